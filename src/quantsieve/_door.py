"""Where the command line starts and ends: errors become text and exit codes here and nowhere else.

0 done, 1 failed (one paragraph says why), 2 wrong usage (with near misses), 130 interrupted, 141 when the reader of
stdout has gone: quietly, with the code that a shell gives for tools that SIGPIPE ends. `--debug` shows tracebacks;
else the one of an unexpected error goes to a file.
"""

import contextlib
import difflib
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

from quantsieve import _streams
from quantsieve.errors import QuantsieveError

FAILED, INTERRUPTED, READER_GONE = 1, 130, 141


class ReaderGone(Exception):
    """Nobody reads stdout any more. Not an OSError: click would turn that into exit code 1."""


class Commands(click.Group):
    """The group of commands; an unknown one is answered with the nearest."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _noticing_a_reader_gone():  # --help and --version print here
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _noticing_a_reader_gone():
            result = super().invoke(ctx)
            sys.stdout.flush()
        return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.commands, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)


@contextlib.contextmanager
def _noticing_a_reader_gone() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        if _streams.is_read(sys.stdout):  # then it is a worker's pipe
            raise RuntimeError("a pipe to another process broke") from error
        raise ReaderGone from error


def say(text: str) -> None:
    """One paragraph on stderr."""
    print(f"quantsieve: {' '.join(text.split())}", file=sys.stderr)


def run(program: click.Group, arguments: Sequence[str]) -> int:
    """The exit code of the command in `arguments`, run to its end."""
    with _streams.own_stdout():
        return _run(program, arguments)


def _run(program: click.Group, arguments: Sequence[str]) -> int:
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that the terminal cannot show must not end the command
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            if not debug:
                _hush_libraries()
            code = program.main(list(arguments), prog_name="quantsieve", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except QuantsieveError as error:
        if debug:
            traceback.print_exc()
        say(str(error))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except ReaderGone:
        # Whoever read us has seen enough; Python would complain once more when it closes stdout.
        _streams.discard(sys.stdout)
        return READER_GONE
    except OSError as error:  # stdout on a full disk, a folder without permission
        if debug:
            traceback.print_exc()
        say(f"The system refused: {error}. What was finished is kept; repeat the command when that is mended.")
        _streams.discard(sys.stdout)
        return FAILED
    except Exception as error:
        say(_unexpected(error, debug))
        return FAILED


def _hush_libraries() -> None:
    """Warnings of the libraries speak to their own developers; ours are in the results."""
    warnings.simplefilter("ignore")
    for name in ("onnx_ir", "onnxscript", "onnx"):
        logging.getLogger(name).addHandler(logging.NullHandler())


def _unexpected(error: Exception, debug: bool) -> str:
    """One paragraph about a fault of ours, and where its traceback is."""
    text = f"Unexpected error, most likely a fault of quantsieve: {type(error).__name__}: {str(error)[:300]}"
    if debug:
        traceback.print_exc()
        return text
    try:
        descriptor, name = tempfile.mkstemp(prefix="quantsieve-", suffix="-traceback.txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exc(file=file)
    except OSError:
        return f"{text}. Repeat with --debug to see the traceback."
    return f"{text}. Please report it with the traceback in {name}; --debug shows it here."

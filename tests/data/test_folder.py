import numpy as np
import pytest
from PIL import Image

from quantsieve.data import InputSpec, Preprocess, open_samples
from quantsieve.errors import InputError


@pytest.fixture
def class_folders(tmp_path, save_image):
    for seed, name in enumerate(("dog/b.png", "dog/a.png", "cat/z.png", "cat/sub/y.png")):
        save_image(tmp_path / name, seed)
    return tmp_path


@pytest.fixture
def labelled(tmp_path, save_image):
    """Images in the subfolder `images` and beside the table, whose order is not alphabetic."""
    save_image(tmp_path / "images" / "b.png", 0)
    save_image(tmp_path / "images" / "a.png", 1)
    save_image(tmp_path / "c.png", 2)
    (tmp_path / "labels.csv").write_text("file,label,name\nb.png,7,x\nc.png,0,y\na.png,3,z\n")
    return tmp_path


def pixels(path):
    return np.asarray(Image.open(path), np.float32).transpose(2, 0, 1)[None]


def damage(path):
    path.write_bytes(path.read_bytes()[:-40])


def test_class_folders_number_the_sorted_names(class_folders, image_spec):
    samples = open_samples(class_folders, [image_spec])
    assert samples.labels.tolist() == [0, 0, 1, 1]
    assert samples.class_names == ("cat", "dog")
    assert not samples.labels.flags.writeable
    np.testing.assert_array_equal(samples.feed(3)["image"], pixels(class_folders / "dog" / "b.png"))


def test_class_names_number_the_folders(class_folders, image_spec):
    samples = open_samples(class_folders, [image_spec], class_names=["bird", "dog", "cat"])
    assert samples.labels.tolist() == [2, 2, 1, 1]


def test_a_folder_that_is_no_class_is_refused_with_the_nearest_name(class_folders, image_spec):
    with pytest.raises(InputError, match=r"'dog'.*Did you mean 'dogs'"):
        open_samples(class_folders, [image_spec], class_names=["cat", "dogs"])


def test_a_class_name_that_comes_twice_cannot_number_a_folder(class_folders, image_spec):
    with pytest.raises(InputError, match="one class named 'dog', found 2"):
        open_samples(class_folders, [image_spec], class_names=["cat", "dog", "dog"])


def test_an_empty_class_folder_keeps_its_number(class_folders, image_spec):
    (class_folders / "cow").mkdir()
    samples = open_samples(class_folders, [image_spec])
    assert samples.labels.tolist() == [0, 0, 2, 2]
    assert "class folders without images: cow" in samples.notes


def test_numbers_as_folder_names_that_do_not_count_as_text_does_are_told(tmp_path, save_image, image_spec):
    for name in range(11):
        save_image(tmp_path / str(name) / "a.png", name)
    samples = open_samples(tmp_path, [image_spec])
    assert samples.labels.tolist() == list(range(11))
    assert any("0, 1, 10, 2" in note for note in samples.notes)


def test_labels_csv_gives_labels_in_its_own_order(labelled, image_spec):
    samples = open_samples(labelled, [image_spec])
    assert samples.labels.tolist() == [7, 0, 3]
    np.testing.assert_array_equal(samples.feed(1)["image"], pixels(labelled / "c.png"))
    np.testing.assert_array_equal(samples.feed(2)["image"], pixels(labelled / "images" / "a.png"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("file,label\nb.png,7\nc.png,0\na.png,x\n", "class number from 0, found 'x' in line 4"),
        ("file,label\nb.png,7\nc.png,-1\na.png,3\n", "found '-1' in line 3"),
        ("file,label\nb.png,7\nc.png\na.png,3\n", "found '' in line 3"),
        ("file,label\nb.png,7\nc.png,0\na.png,3\nd.png,1\n", r"no file 'd\.png' \(line 5\)"),
        ("file,label\nb.png,7\nc.png,0\n", r"none for images/a\.png"),
        ("file,label\nb.png,7\n", r"none for c\.png and 1 more"),
        ("file,label\nb.png,7\nc.png,0\na.png,3\nb.png,7\n", r"'b\.png' again in line 5"),
        ("file,class\nb.png,7\n", "columns file,label in labels.csv, found file,class"),
        ("", "found an empty file"),
        ("file,label\n", "none for"),
    ],
)
def test_bad_rows_of_labels_csv_are_refused(labelled, image_spec, table, message):
    (labelled / "labels.csv").write_text(table)
    with pytest.raises(InputError, match=message):
        open_samples(labelled, [image_spec])


def test_a_table_from_a_spreadsheet_is_read(labelled, image_spec):
    table = "\ufefffile, label\r\nb.png, 7\r\nc.png, 0\r\na.png, 3\r\n"
    (labelled / "labels.csv").write_bytes(table.encode())
    assert open_samples(labelled, [image_spec]).labels.tolist() == [7, 0, 3]


def test_a_table_in_another_encoding_is_refused(labelled, image_spec):
    (labelled / "labels.csv").write_bytes("file,label\nK\u00f6ln.png,1\n".encode("latin-1"))
    with pytest.raises(InputError, match="UTF-8"):
        open_samples(labelled, [image_spec])


def test_labels_outside_the_class_names_are_refused(labelled, image_spec):
    with pytest.raises(InputError, match="from 0 to 2, found '7'"):
        open_samples(labelled, [image_spec], class_names=["a", "b", "c"])


@pytest.mark.parametrize("subfolder", ["", "images"])
def test_images_alone_have_no_labels(tmp_path, save_image, image_spec, subfolder):
    for seed, name in enumerate(("b.PNG", "a.bmp", "c.webp", "d.ppm")):
        save_image(tmp_path / subfolder / name, seed)
    samples = open_samples(tmp_path, [image_spec])
    assert samples.labels is None
    assert len(samples) == 4
    np.testing.assert_array_equal(samples.feed(0)["image"], pixels(tmp_path / subfolder / "a.bmp"))


def test_other_and_hidden_files_are_left_alone(tmp_path, save_image, image_spec):
    save_image(tmp_path / "a.png")
    save_image(tmp_path / ".thumbnails" / "a.png")
    save_image(tmp_path / "__MACOSX" / "a.png")
    (tmp_path / "readme.txt").write_text("hello")
    assert len(open_samples(tmp_path, [image_spec])) == 1


def test_loose_images_beside_class_folders_are_refused(class_folders, save_image, image_spec):
    save_image(class_folders / "loose.png")
    with pytest.raises(InputError, match=r"both \(loose\.png beside cat"):
        open_samples(class_folders, [image_spec])


def test_an_empty_folder_is_refused(tmp_path, image_spec):
    with pytest.raises(InputError, match="found none"):
        open_samples(tmp_path, [image_spec])


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "tiff", "webp"])
def test_a_damaged_image_is_refused_by_name_at_opening(tmp_path, save_image, image_spec, suffix):
    save_image(tmp_path / "good.png")
    save_image(tmp_path / f"bad.{suffix}", height=64, width=64)
    data = (tmp_path / f"bad.{suffix}").read_bytes()
    (tmp_path / f"bad.{suffix}").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=rf"found bad\.{suffix} \(.*--skip-bad"):
        open_samples(tmp_path, [image_spec])


def test_damaged_images_are_skipped_and_counted_on_demand(class_folders, image_spec):
    damage(class_folders / "cat" / "z.png")
    (class_folders / "dog" / "a.png").write_text("no image")
    samples = open_samples(class_folders, [image_spec], skip_bad=True)
    assert samples.labels.tolist() == [0, 1]
    assert "2 unreadable images skipped: cat/z.png, dog/a.png" in samples.notes
    np.testing.assert_array_equal(samples.feed(1)["image"], pixels(class_folders / "dog" / "b.png"))


def test_a_folder_of_damaged_images_only_is_refused_even_then(tmp_path, image_spec):
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(InputError, match="1 unreadable ones"):
        open_samples(tmp_path, [image_spec], skip_bad=True)


def test_an_image_that_breaks_later_is_an_error_with_its_name(tmp_path, save_image, image_spec):
    save_image(tmp_path / "a.png")
    samples = open_samples(tmp_path, [image_spec])
    damage(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"readable before, found a\.png"):
        samples.feed(0)


def test_an_image_that_ends_in_another_shape_is_refused_at_opening(tmp_path, save_image, image_spec):
    save_image(tmp_path / "a.png", height=8, width=6)
    save_image(tmp_path / "b.png", height=6, width=20)
    with pytest.raises(InputError, match=r"\[1, 3, 6, 20\] from b\.png"):
        open_samples(tmp_path, [image_spec], preprocess=Preprocess(resize=6))


def test_resizing_that_nobody_asked_for_is_told(tmp_path, save_image, image_spec):
    save_image(tmp_path / "a.png", height=8, width=6)
    assert not any("resized" in note for note in open_samples(tmp_path, [image_spec]).notes)
    save_image(tmp_path / "b.png", height=9, width=6)
    assert "1 of 2 images resized to 8x6, the size that the model takes" in open_samples(tmp_path, [image_spec]).notes


def test_resizing_that_was_asked_for_is_not_told(tmp_path, save_image, image_spec):
    save_image(tmp_path / "a.png", height=9, width=6)
    samples = open_samples(tmp_path, [image_spec], preprocess=Preprocess(resize=(8, 6)))
    assert not any("resized" in note for note in samples.notes)


def test_equal_files_are_told(tmp_path, save_image, image_spec):
    for name in ("a.png", "b.png", "c.png"):
        save_image(tmp_path / name, seed=0)
    assert "2 of 3 images equal another one byte for byte" in open_samples(tmp_path, [image_spec]).notes


def test_images_feed_models_with_one_input_only(class_folders, image_spec):
    with pytest.raises(InputError, match=r"one input.*'image', 'mask'"):
        open_samples(class_folders, [image_spec, InputSpec("mask", "float32", (1, 8, 6))])


def test_the_preprocessing_in_use_says_what_the_model_settled(class_folders, image_spec):
    used = open_samples(class_folders, [image_spec]).preprocess
    assert (used.layout, used.color, used.resize) == ("nchw", "rgb", (8, 6))


def test_the_fingerprint_follows_content_labels_and_preprocessing_but_not_paths(tmp_path, save_image, image_spec):
    def fingerprint(folder, **options):
        return open_samples(tmp_path / folder, [image_spec], **options).fingerprint()

    for folder, names in {
        "one": ("cat/a", "dog/b"),
        "two": ("ape/x", "bee/y"),
        "three": ("cat/a", "cat/b"),
    }.items():
        for seed, name in enumerate(names):
            save_image(tmp_path / folder / f"{name}.png", seed)
    (tmp_path / "three" / "dog").mkdir()
    assert fingerprint("one") == fingerprint("two")
    assert fingerprint("one") != fingerprint("three")
    assert fingerprint("one") != fingerprint("one", preprocess=Preprocess(mean=(1.0,)))
    assert fingerprint("one") != fingerprint("one", class_names=["dog", "cat"])
    save_image(tmp_path / "two" / "ape" / "x.png", seed=9)
    assert fingerprint("one") != fingerprint("two")

"""Selective post-training quantization of ONNX models."""

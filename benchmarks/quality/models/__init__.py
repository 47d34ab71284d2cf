"""Every trained model of the zoo, one table each: what onnxruntime's own quantizers make of it, and what tune does."""

"""Accept length per sample: variants of training, and SpecForge, on the same data and steps."""

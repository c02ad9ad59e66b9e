"""The EAGLE-3 domain core: wiring, draft model, draft vocabulary, served folder, target weights."""

"""DiffusionGemma: configuration, model, import and export."""

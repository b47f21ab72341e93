"""Images in prompts: `feature.py` answers the engine, `load.py` reads what a model has for them."""

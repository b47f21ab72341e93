"""Images in prompts: models, expansions, and towers' inputs."""

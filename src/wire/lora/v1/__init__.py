"""Generated stubs of `proto/lora/v1/lora.proto`; `make stubs` rewrites them, a test keeps them fresh."""

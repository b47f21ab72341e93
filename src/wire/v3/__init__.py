"""Generated stubs of `proto/v3/generate.proto`; `make stubs` rewrites them, a test keeps them fresh."""

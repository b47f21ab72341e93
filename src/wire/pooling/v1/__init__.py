"""Generated stubs of `proto/pooling/v1/pooling.proto`; `make stubs` rewrites them, a test keeps them fresh."""

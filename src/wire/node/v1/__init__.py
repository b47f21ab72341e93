"""Generated stubs of `proto/node/v1/node.proto`; `make stubs` rewrites them, a test keeps them fresh."""

"""TGI's own form of tool calls: schema, parser, and the pass that decides before the answer."""

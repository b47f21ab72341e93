"""Which protocol router and shards speak. They are of one release: a router refuses shards with another number."""

# Raised with every change of proto/v3/generate.proto that the other side must know of. Shards of earlier releases, and
# those of text-generation-inference, send none, which reads as 0.
PROTOCOL = 6

"""Objects in S3: listing, conditional writes, streaming uploads and ranged reads."""

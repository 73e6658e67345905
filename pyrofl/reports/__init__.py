"""Reports of fitted runs as HTML pages: a first page in words, then tables and figures."""

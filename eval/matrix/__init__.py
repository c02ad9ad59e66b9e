"""The compatibility matrix: which draft works on which SGLang build with which ids, computed and measured."""

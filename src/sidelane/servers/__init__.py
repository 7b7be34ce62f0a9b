"""Plug-ins for servers of language models: vLLM and SGLang (docs/guide/vllm.md).

Importing this package, and the modules that servers name as entry points, imports no server.
"""

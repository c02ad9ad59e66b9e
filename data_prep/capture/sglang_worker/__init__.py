"""The program that runs under the interpreter that has SGLang; it imports nothing of this project.

Started as a folder (`python .../sglang_worker`), so that its modules find each other by plain names there.
"""

"""Sequences of tokens on a loaded bundle.

A session has the states of one sequence, such as KV caches, and its position: the number of tokens
in the states. A batch has slots, each with a session, and decodes one token of several slots in one
call. A chunk is the tokens that one prefill call reads; a function's width is the number of tokens
or slots of a call. Some states can return only to some earlier positions (`states`).
"""

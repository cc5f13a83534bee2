"""Generation of tokens: scheduler, sampling, constraints, prefix cache, speculative decoding.

A slot has the states of one sequence: its KV caches, and recurrent states if the model has them.
They stay after a request has ended, so that later prompts can reuse them (the prefix cache). A
chunk is the tokens that one prefill call reads. In a turn, the scheduler reads a chunk of one
prompt, and decodes one token of each other request. A constraint, such as a grammar, limits the
next token; a token that it determines is forced. A request that loses its slot is preempted.
Arguments called `top` are the request's `prompt_logprobs`, and `salt` its `cache_salt`: prompts
reuse only states of their own salt, so that no client can learn another's prompts from timings.
"""

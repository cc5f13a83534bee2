"""Faults in the text of kernels, which IREE compiles."""

from tests.mutants.mutant import Mutant

PRODUCTS, WEIGHTS, ATTENTION, RECURRENT, WRITING = (
    f"emitter/kernels/{room}" for room in ("products", "weights", "attention", "recurrent", "writing")
)
_OTHERS = "test_other_targets_compile_and_their_kernels_match_the_definition"
_GEMV = (f"tests/emitter/test_gemv.py::{_OTHERS}[x86-64-v3]",)
_GEMM = (f"tests/emitter/test_gemm.py::{_OTHERS}[x86-64-v3]",)
_FEW = (f"tests/emitter/test_gemm_few.py::{_OTHERS}[x86-64-v3]",)
_EXPERTS = (f"tests/emitter/test_gemv_experts.py::{_OTHERS}[x86-64-v3]",)
_NORM = (f"tests/emitter/test_norm.py::{_OTHERS}[x86-64-v3]",)
_ARGMAX = (f"tests/emitter/test_argmax.py::{_OTHERS}[x86-64-v3]",)
_ATTENTION = (f"tests/emitter/test_attention.py::{_OTHERS}[x86-64-v3-f32]",)
_BYTES = (f"tests/emitter/test_attention.py::{_OTHERS}[x86-64-v3-q8_0]",)
_RECURRENT = (f"tests/emitter/test_recurrent_kernels.py::{_OTHERS}[x86-64-v3]",)
_MODEL = ("tests/test_end_to_end.py::test_logits_are_those_of_hf[kernels-1]",)
_CANONICAL = ("tests/emitter/test_canonical.py::test_a_row_of_a_product_has_the_same_bits_in_every_kernel",)
_MATHS = "tests/emitter/test_vector_math.py"

FAULTS = (
    Mutant(
        "bias dropped",
        f"{PRODUCTS}/epilogue.py",
        'y = b.addf(y, read(buffers["bias"], column))',
        'read(buffers["bias"], column)',
        _MODEL,
    ),
    Mutant(
        "residual dropped",
        f"{PRODUCTS}/epilogue.py",
        'return b.addf(y, read(buffers["residual"], row, column)) if self.residual else y',
        "return y",
        _MODEL,
    ),
    Mutant(
        "GLU's activation on up",
        f"{PRODUCTS}/epilogue.py",
        "[b.mulf(activate(b, gate), up) for",
        "[b.mulf(activate(b, up), gate) for",
        _GEMV,
    ),
    Mutant(
        "minimum of a block ignored",
        f"{PRODUCTS}/gemv.py",
        "                total = b.fma(minimum, self.x.sum_of(slot), total)\n            done",
        "                pass\n            done",
        _GEMV,
    ),
    Mutant(
        "scale of the first group for all",
        f"{PRODUCTS}/gemv.py",
        "scale = records.group_scale(row_blocks[i], record, g.index, v)",
        "scale = records.group_scale(row_blocks[i], record, 0, v)",
        _GEMV,
    ),
    Mutant(
        "x of the record before",
        f"{PRODUCTS}/gemv.py",
        "at = b.add(b.mul(slot, groups), g.index)\n            products = self._group(row_blocks, record, g.index, at, soon)\n            sums",
        "at = b.mul(slot, groups)\n            products = self._group(row_blocks, record, g.index, at, soon)\n            sums",
        _GEMV,
    ),
    Mutant(
        "last row block twice",
        f"{PRODUCTS}/gemv.py",
        "[b.min(block, self.row_blocks - 1) for block in row_blocks]",
        "[b.min(block, self.row_blocks - 2) for block in row_blocks]",
        _CANONICAL,
    ),
    Mutant(
        "even and odd bf16 swapped",
        f"{WEIGHTS}/records.py",
        "for half in (even, odd)]",
        "for half in (odd, even)]",
        _GEMV,
    ),
    Mutant(
        "scales read as minima",
        f"{WEIGHTS}/records.py",
        "return self._factor(self.layout.minima, False,",
        "return self._factor(self.layout.scales, False,",
        _GEMV,
    ),
    Mutant(
        "signed scales read as unsigned",
        f"{WEIGHTS}/records.py",
        "self._factor(self.layout.scales, self.codec.minimum == 0,",
        "self._factor(self.layout.scales, False,",
        _GEMV,
    ),
    Mutant(
        "power of two of the topmost field",
        f"{WEIGHTS}/records.py",
        "[1.0 if shift == top else 2.0**-shift for shift in shifts]",
        "[2.0**-shift for shift in shifts]",
        _GEMV,
    ),
    Mutant(
        "mask of a field one bit short",
        f"{WEIGHTS}/records.py",
        "return self._masked(self._word(word, v), ((1 << bits) - 1) << shift)",
        "return self._masked(self._word(word, v), ((1 << bits - 1) - 1) << shift)",
        _GEMV,
    ),
    Mutant(
        "offset of codes added",
        f"{WEIGHTS}/prepared_x.py",
        "b.f32(codec.minimum or -codec.offset)",
        "b.f32(codec.minimum or codec.offset)",
        _GEMV,
    ),
    Mutant(
        "norm's weight dropped before a product",
        f"{WEIGHTS}/prepared_x.py",
        "return b.mulf(b.mulf(x, b.broadcast(self.inverse, width)), b.vload(self.norm, width, k))",
        "return b.mulf(x, b.broadcast(self.inverse, width))",
        _MODEL,
    ),
    Mutant(
        "a tile short of the last tokens",
        f"{PRODUCTS}/gemm.py",
        "                self._tile(b.sub(start, first), start, rest, k, depth)\n",
        "                self._tile(b.sub(start, first), start, rest - 1 or rest, k, depth)\n",
        _CANONICAL,
    ),
    Mutant(
        "chunk border of a panel",
        f"{PRODUCTS}/gemm.py",
        "            self._multiply(first, count, k.index, depth)\n",
        "            self._multiply(first, count, k.index, depth - 1)\n",
        _GEMM,
    ),
    Mutant(
        "sums of an earlier block of tokens kept",
        f"{PRODUCTS}/gemm.py",
        "        self._zero(count)\n        with",
        "        with",
        _GEMM,
    ),
    Mutant(
        "results of padding not zero",
        f"{PRODUCTS}/several.py",
        "put(token.index, [b.splat(0.0, lanes)] * (LANES // lanes), False)",
        "put(token.index, [b.splat(1.0, lanes)] * (LANES // lanes), False)",
        _GEMM,
    ),
    Mutant(
        "experts counted by pair",
        f"{PRODUCTS}/experts.py",
        'base = b.mul(b.to_index(b.load(buffers["chosen"], pair)), row_blocks)',
        'base = b.mul(b.to_index(b.load(buffers["chosen"], row)), row_blocks)',
        _EXPERTS,
    ),
    Mutant(
        "a pair takes the next token's x",
        f"{PRODUCTS}/experts.py",
        "row = b.div(pair, product.per_row)",
        "row = b.rem(pair, product.tokens // product.per_row)",
        _EXPERTS,
    ),
    Mutant(
        "epsilon outside the root",
        f"{WRITING}/rms.py",
        "b.divf(b.f32(1.0), b.sqrt(b.addf(mean, b.f32(eps))))",
        "b.divf(b.f32(1.0), b.addf(b.sqrt(mean), b.f32(eps)))",
        _NORM,
    ),
    Mutant(
        "variance about zero",
        "emitter/kernels/norm.py",
        "scale = b.broadcast(inverse_rms(b, element, hidden, eps, isa.lanes), width)",
        "scale = b.broadcast(inverse_rms(b, read, hidden, eps, isa.lanes), width)",
        _NORM,
    ),
    Mutant(
        "tie broken high",
        "emitter/kernels/argmax.py",
        "at = b.sub(b.sub(last, 1), loop.index)",
        "at = b.add(first, loop.index)",
        _ARGMAX,
    ),
    Mutant(
        "tie of two blocks broken high",
        "emitter/kernels/argmax.py",
        'better = b.compare("ogt", top, loop.values[0])',
        'better = b.compare("oge", top, loop.values[0])',
        _ARGMAX,
    ),
    Mutant(
        "row of the embedding beside the wanted one",
        "emitter/kernels/embed.py",
        "x = b.load(panel.values, j.index, b.rem(id, LANES))",
        "x = b.load(panel.values, j.index, b.rem(b.add(id, 1), LANES))",
        ("tests/emitter/test_embed.py::test_other_targets_compile_and_their_kernels_give_the_same[x86-64-v4]",),
    ),
    Mutant(
        "decode's window one longer",
        f"{ATTENTION}/decode.py",
        "low = 0 if window is None else b.max(b.sub(position, window - 1), 0)",
        "low = 0 if window is None else b.max(b.sub(position, window), 0)",
        _ATTENTION,
    ),
    Mutant(
        "last part of a split context left out",
        f"{ATTENTION}/decode.py",
        "b.broadcast(b.to_i32(count), splits))",
        "b.broadcast(b.to_i32(b.sub(count, 1)), splits))",
        _ATTENTION,
    ),
    Mutant(
        "counters of parts not zero again",
        f"{ATTENTION}/decode.py",
        '                    b.store(b.constant("0", "i32"), counters, counter)\n',
        "",
        _ATTENTION,
    ),
    Mutant(
        "a batch's sequence at position 0 left alone",
        f"{ATTENTION}/decode.py",
        "            idle = b.less(own, 0)\n",
        "            idle = b.less(own, 1)\n",
        ("tests/test_batch.py::test_slots_that_are_not_stepped_keep_every_position[kernels]",),
    ),
    Mutant(
        "query heads of the first KV head for all",
        f"{ATTENTION}/workgroup.py",
        "low = self.b.mul(self.b.sub(head, self.first), self.group)",
        "low = self.b.mul(self.b.sub(self.first, self.first), self.group)",
        _ATTENTION,
    ),
    Mutant(
        "scores of an earlier tile in the last vector",
        f"{ATTENTION}/workgroup.py",
        "b.vstore(b.splat(NEVER, self.lanes), self.scores, g.index, last)",
        "b.vstore(b.splat(0.0, self.lanes), self.scores, g.index, last)",
        _ATTENTION,
    ),
    Mutant(
        "what was summed not scaled down",
        f"{ATTENTION}/workgroup.py",
        "                self.scale_down(g, b.extract(exp(b, b.broadcast(b.subf(old, top), lanes)), 0))\n",
        "                pass\n",
        ("tests/emitter/test_attention.py::test_scores_far_apart_and_far_from_the_first[f32]",),
    ),
    Mutant(
        "prefill's mask off by one",
        f"{ATTENTION}/prefill.py",
        'seen = b.compare("sle", position, limit)',
        'seen = b.compare("slt", position, limit)',
        _ATTENTION,
    ),
    Mutant(
        "prefill's window one longer",
        f"{ATTENTION}/prefill.py",
        'seen = b.both(seen, b.compare("sgt", near, limit))',
        'seen = b.both(seen, b.compare("sge", near, limit))',
        _ATTENTION,
    ),
    Mutant(
        "prefill's sums not rescaled",
        f"{ATTENTION}/prefill.py",
        "sums.append(b.mulf(b.vload(self.sums, shape.width, c), rescale))",
        "sums.append(b.vload(self.sums, shape.width, c))",
        _ATTENTION,
    ),
    Mutant(
        "padding appended to the caches",
        f"{ATTENTION}/rope_append.py",
        "with b.when(b.less(t, real)), b.loop(",
        "with b.when(b.less(t, T)), b.loop(",
        _ATTENTION,
    ),
    Mutant(
        "values appended unrotated keys",
        f"{ATTENTION}/rope_append.py",
        "value = Span(qkv, [t], b.add(offset, layout.kv_heads * hd))",
        "value = Span(qkv, [t], offset)",
        _ATTENTION,
    ),
    Mutant(
        "norm's weights of the first head for all",
        f"{ATTENTION}/heads.py",
        "weight_offset = b.mul(head, hd) if layout.qk_norm_row else 0",
        "weight_offset = 0",
        _ATTENTION,
    ),
    Mutant(
        "halves of a head swapped",
        f"{ATTENTION}/heads.py",
        "first, second = read(d, width), read(d + half, width)",
        "second, first = read(d, width), read(d + half, width)",
        _ATTENTION,
    ),
    Mutant(
        "row of a ring one too late",
        f"{ATTENTION}/rows.py",
        "self.b.rem(position, self.ring)",
        "self.b.rem(position, self.ring - 1)",
        ("tests/emitter/test_attention.py::test_a_ring_gives_the_bits_of_rows_of_every_position[f32]",),
    ),
    Mutant(
        "KV quantisation: scale of the group before",
        f"{ATTENTION}/rows.py",
        'd = b.bitcast(b.vload(self.buffer, SCALE_BYTES, *at, g, 0), 1, "f32")',
        'd = b.bitcast(b.vload(self.buffer, SCALE_BYTES, *at, base, 0), 1, "f32")',
        _BYTES,
    ),
    Mutant(
        "KV quantisation: scale over 128",
        f"{WRITING}/rounding.py",
        "b.divf(most, b.f32(MOST))\n",
        "b.divf(most, b.f32(MOST + 1))\n",
        _BYTES,
    ),
    Mutant(
        "conv state not shifted, in a kernel",
        f"{RECURRENT}/causal_conv.py",
        "t.give(*(value for row in seen[1:] for value in row))",
        "t.give(*(value for row in seen[:-1] for value in row))",
        _RECURRENT,
    ),
    Mutant(
        "decay of a scan lost",
        f"{RECURRENT}/selective_scan.py",
        "after = b.fma(factor, written, b.mulf(b.vload(state, width, *where), left))",
        "after = b.fma(factor, written, b.vload(state, width, *where))",
        _RECURRENT,
    ),
    Mutant(
        "a digit of exp's polynomial",
        f"{WRITING}/vectors.py",
        "EXP_POLYNOMIAL = (1.381459860e-3, 8.368716914e-3, 4.166838805e-2",
        "EXP_POLYNOMIAL = (1.381459860e-3, 8.368716914e-3, 4.166938805e-2",
        (f"{_MATHS}::test_exp_is_within_its_error",),
    ),
    Mutant(
        "exp past its limit",
        f"{WRITING}/vectors.py",
        '    x = b.select(b.compare("olt", x, b.splat(EXP_HIGH, width)), x, b.splat(EXP_HIGH, width))\n',
        "",
        (f"{_MATHS}::test_exp_has_limits",),
    ),
    Mutant(
        "multiply and add fused where nobody asked",
        f"{WRITING}/body.py",
        "        if not self._fenced:\n            return product\n",
        "        if product:\n            return product\n",
        ("tests/emitter/test_canonical.py::test_a_product_is_kept_from_the_sum_behind_it",),
    ),
)

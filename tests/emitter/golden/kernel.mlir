module @small {
util.global private @"embed.weight" = #flow.parameter.named<"model"::"embed.weight"> : tensor<5x8xbf16>
stream.executable private @append_row {
  stream.executable.export public @append_row_fn workgroups() -> (index, index, index) {
    %n = arith.constant 1 : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }
  builtin.module {
    func.func @append_row_fn(%b0: !stream.binding, %b1: !stream.binding, %b2: !stream.binding, %i0: index) attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
      %c0 = arith.constant 0 : index
      %m0 = stream.binding.subspan %b0[%c0] : !stream.binding -> memref<8xf32>
      %m1 = stream.binding.subspan %b1[%c0] : !stream.binding -> memref<i32>
      %m2 = stream.binding.subspan %b2[%c0] : !stream.binding -> memref<2x6x8xf32>
      %1 = vector.load %m0[%c0] : memref<8xf32>, vector<8xf32>
      %2 = memref.load %m1[] : memref<i32>
      %3 = arith.index_cast %2 : i32 to index
      vector.store %1, %m2[%i0, %3, %c0] : memref<2x6x8xf32>, vector<8xf32>
      return
    }
  }
}
  func.func public @step(%token: tensor<i32>, %pos: tensor<i32>, %cache: tensor<2x6x8xf32> {iree.abi.output = 2 : index}) -> (tensor<i32>, tensor<5xf32>, tensor<2x6x8xf32>) {
    %index_1 = arith.constant 1 : index
    %0 = util.global.load @"embed.weight" : tensor<5x8xbf16> loc("model.embed_tokens")
    %1 = stablehlo.reshape %token : (tensor<i32>) -> tensor<1xi32> loc("model.embed_tokens")
    %2 = "stablehlo.gather"(%0, %1) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 8>, indices_are_sorted = false}> : (tensor<5x8xbf16>, tensor<1xi32>) -> tensor<1x8xbf16> loc("model.embed_tokens")
    %3 = stablehlo.convert %2 : (tensor<1x8xbf16>) -> tensor<1x8xf32> loc("model.embed_tokens")
    %4 = stablehlo.reshape %3 : (tensor<1x8xf32>) -> tensor<8xf32> loc("model.embed_tokens")
    %5 = flow.dispatch @append_row::@append_row_fn(%4, %pos, %cache, %index_1) : (tensor<8xf32>, tensor<i32>, tensor<2x6x8xf32>, index) -> %cache loc("model.layers.1")
    %6 = stablehlo.constant dense<0.00000000e0> : tensor<f32> loc("model.layers.1")
    %7 = stablehlo.reduce(%5 init: %6) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x6x8xf32>, tensor<f32>) -> tensor<8xf32> loc("model.layers.1")
    %8 = stablehlo.convert %0 : (tensor<5x8xbf16>) -> tensor<5x8xf32> loc("step")
    %9 = stablehlo.dot_general %8, %7, contracting_dims = [1] x [0] : (tensor<5x8xf32>, tensor<8xf32>) -> tensor<5xf32> loc("step")
    %10 = stablehlo.iota dim = 0 : tensor<5xi32> loc("step")
    %11 = stablehlo.constant dense<0xFF800000> : tensor<f32> loc("step")
    %12 = stablehlo.constant dense<0> : tensor<i32> loc("step")
    %13:2 = "stablehlo.reduce"(%9, %10, %11, %12) <{dimensions = array<i64: 0>}> ({
    ^bb0(%_xv: tensor<f32>, %_xi: tensor<i32>, %_yv: tensor<f32>, %_yi: tensor<i32>):
      %_greater = stablehlo.compare GT, %_xv, %_yv, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
      %_equal = stablehlo.compare EQ, %_xv, %_yv, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
      %_first = stablehlo.compare LT, %_xi, %_yi, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %_tie = stablehlo.and %_equal, %_first : tensor<i1>
      %_keep = stablehlo.or %_greater, %_tie : tensor<i1>
      %_value = stablehlo.select %_keep, %_xv, %_yv : tensor<i1>, tensor<f32>
      %_index = stablehlo.select %_keep, %_xi, %_yi : tensor<i1>, tensor<i32>
      stablehlo.return %_value, %_index : tensor<f32>, tensor<i32>
    }) : (tensor<5xf32>, tensor<5xi32>, tensor<f32>, tensor<i32>) -> (tensor<f32>, tensor<i32>) loc("step")
    return %13#1, %9, %5 : tensor<i32>, tensor<5xf32>, tensor<2x6x8xf32>
  }
}

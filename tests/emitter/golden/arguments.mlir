module @small {
  func.func public @step(%token: tensor<i32>, %pos: tensor<i32>, %cache: tensor<2x6x8xf32>, %embed.weight: tensor<5x8xbf16>) -> (tensor<i32>, tensor<5xf32>, tensor<2x6x8xf32>) {
    %0 = stablehlo.reshape %token : (tensor<i32>) -> tensor<1xi32> loc("model.embed_tokens")
    %1 = "stablehlo.gather"(%embed.weight, %0) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 8>, indices_are_sorted = false}> : (tensor<5x8xbf16>, tensor<1xi32>) -> tensor<1x8xbf16> loc("model.embed_tokens")
    %2 = stablehlo.convert %1 : (tensor<1x8xbf16>) -> tensor<1x8xf32> loc("model.embed_tokens")
    %3 = stablehlo.reshape %2 : (tensor<1x8xf32>) -> tensor<8xf32> loc("model.embed_tokens")
    %4 = stablehlo.constant dense<1.00000001e-1> : tensor<2x6x8xf32> loc("model.layers.1")
    %5 = stablehlo.multiply %cache, %4 : tensor<2x6x8xf32> loc("model.layers.1")
    %6 = stablehlo.constant dense<1> : tensor<i32> loc("model.layers.1")
    %7 = stablehlo.constant dense<0> : tensor<i32> loc("model.layers.1")
    %8 = stablehlo.reshape %3 : (tensor<8xf32>) -> tensor<1x1x8xf32> loc("model.layers.1")
    %9 = stablehlo.dynamic_update_slice %5, %8, %6, %pos, %7 : (tensor<2x6x8xf32>, tensor<1x1x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x6x8xf32> loc("model.layers.1")
    %10 = stablehlo.constant dense<0.00000000e0> : tensor<f32> loc("model.layers.1")
    %11 = stablehlo.reduce(%9 init: %10) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x6x8xf32>, tensor<f32>) -> tensor<8xf32> loc("model.layers.1")
    %12 = stablehlo.convert %embed.weight : (tensor<5x8xbf16>) -> tensor<5x8xf32> loc("step")
    %13 = stablehlo.dot_general %12, %11, contracting_dims = [1] x [0] : (tensor<5x8xf32>, tensor<8xf32>) -> tensor<5xf32> loc("step")
    %14 = stablehlo.iota dim = 0 : tensor<5xi32> loc("step")
    %15 = stablehlo.constant dense<0xFF800000> : tensor<f32> loc("step")
    %16 = stablehlo.constant dense<0> : tensor<i32> loc("step")
    %17:2 = "stablehlo.reduce"(%13, %14, %15, %16) <{dimensions = array<i64: 0>}> ({
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
    return %17#1, %13, %9 : tensor<i32>, tensor<5xf32>, tensor<2x6x8xf32>
  }
}

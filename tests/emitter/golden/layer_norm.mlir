// castiron emit --kernel layer_norm --shape 16 --tokens 4 --isa avx2 --threads 2
// 102 lines, sha256 8c7f648ca480d6f32b912b44b4511ad2441ad643cee614305e7c5ed49cf3ea85
stream.executable private @layer_norm_4x16_1em05_bias_length_avx2_r4 {
  stream.executable.export public @layer_norm_4x16_1em05_bias_length_avx2_r4_fn workgroups() -> (index, index, index) {
    %n = arith.constant 1 : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }
  builtin.module {
    func.func @layer_norm_4x16_1em05_bias_length_avx2_r4_fn(%b0: !stream.binding, %b1: !stream.binding, %b2: !stream.binding, %b3: !stream.binding, %b4: !stream.binding) attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 4 : index
      %c2 = arith.constant 1 : index
      %c3 = arith.constant dense<0x00000000> : vector<8xf32>
      %c4 = arith.constant 16 : index
      %c5 = arith.constant 8 : index
      %c6 = arith.constant 0x41800000 : f32
      %c7 = arith.constant 0x3F800000 : f32
      %c8 = arith.constant 0x3727C5AC : f32
      %m0 = stream.binding.subspan %b0[%c0] : !stream.binding -> memref<4x16xf32>
      %m1 = stream.binding.subspan %b1[%c0] : !stream.binding -> memref<16xf32>
      %m2 = stream.binding.subspan %b2[%c0] : !stream.binding -> memref<16xf32>
      %m3 = stream.binding.subspan %b3[%c0] : !stream.binding -> memref<i32>
      %m4 = stream.binding.subspan %b4[%c0] : !stream.binding -> memref<4x16xf32>
      %1 = stream.dispatch.workgroup.id[0] : index
      %2 = arith.muli %1, %c1 : index
      %3 = arith.addi %2, %c1 : index
      %4 = arith.minsi %3, %c1 : index
      %5 = memref.load %m3[] : memref<i32>
      %6 = arith.index_cast %5 : i32 to index
      %7 = arith.minsi %6, %4 : index
      %8 = arith.maxsi %7, %2 : index
      scf.for %9 = %2 to %8 step %c2 {
        %14:2 = scf.for %11 = %c0 to %c4 step %c4 iter_args(%12 = %c3, %13 = %c3) -> (vector<8xf32>, vector<8xf32>) {
          %15 = vector.load %m0[%9, %11] : memref<4x16xf32>, vector<8xf32>
          %16 = arith.addf %12, %15 : vector<8xf32>
          %17 = arith.addi %11, %c5 : index
          %18 = vector.load %m0[%9, %17] : memref<4x16xf32>, vector<8xf32>
          %19 = arith.addf %13, %18 : vector<8xf32>
          scf.yield %16, %19 : vector<8xf32>, vector<8xf32>
        }
        %20 = arith.addf %14#0, %14#1 : vector<8xf32>
        %21 = vector.shuffle %20, %20 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
        %22 = vector.shuffle %20, %20 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
        %23 = arith.addf %21, %22 : vector<4xf32>
        %24 = vector.shuffle %23, %23 [0, 1] : vector<4xf32>, vector<4xf32>
        %25 = vector.shuffle %23, %23 [2, 3] : vector<4xf32>, vector<4xf32>
        %26 = arith.addf %24, %25 : vector<2xf32>
        %27 = vector.shuffle %26, %26 [0] : vector<2xf32>, vector<2xf32>
        %28 = vector.shuffle %26, %26 [1] : vector<2xf32>, vector<2xf32>
        %29 = arith.addf %27, %28 : vector<1xf32>
        %30 = vector.extract %29[0] : f32 from vector<1xf32>
        %31 = arith.divf %30, %c6 : f32
        %35:2 = scf.for %32 = %c0 to %c4 step %c4 iter_args(%33 = %c3, %34 = %c3) -> (vector<8xf32>, vector<8xf32>) {
          %36 = vector.load %m0[%9, %32] : memref<4x16xf32>, vector<8xf32>
          %37 = vector.broadcast %31 : f32 to vector<8xf32>
          %38 = arith.subf %36, %37 : vector<8xf32>
          %39 = arith.mulf %38, %38 : vector<8xf32>
          %40 = arith.addf %33, %39 : vector<8xf32>
          %41 = arith.addi %32, %c5 : index
          %42 = vector.load %m0[%9, %41] : memref<4x16xf32>, vector<8xf32>
          %43 = vector.broadcast %31 : f32 to vector<8xf32>
          %44 = arith.subf %42, %43 : vector<8xf32>
          %45 = arith.mulf %44, %44 : vector<8xf32>
          %46 = arith.addf %34, %45 : vector<8xf32>
          scf.yield %40, %46 : vector<8xf32>, vector<8xf32>
        }
        %47 = arith.addf %35#0, %35#1 : vector<8xf32>
        %48 = vector.shuffle %47, %47 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
        %49 = vector.shuffle %47, %47 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
        %50 = arith.addf %48, %49 : vector<4xf32>
        %51 = vector.shuffle %50, %50 [0, 1] : vector<4xf32>, vector<4xf32>
        %52 = vector.shuffle %50, %50 [2, 3] : vector<4xf32>, vector<4xf32>
        %53 = arith.addf %51, %52 : vector<2xf32>
        %54 = vector.shuffle %53, %53 [0] : vector<2xf32>, vector<2xf32>
        %55 = vector.shuffle %53, %53 [1] : vector<2xf32>, vector<2xf32>
        %56 = arith.addf %54, %55 : vector<1xf32>
        %57 = vector.extract %56[0] : f32 from vector<1xf32>
        %58 = arith.divf %57, %c6 : f32
        %59 = arith.addf %58, %c8 : f32
        %60 = math.sqrt %59 : f32
        %61 = arith.divf %c7, %60 : f32
        %62 = vector.broadcast %61 : f32 to vector<8xf32>
        scf.for %63 = %c0 to %c4 step %c5 {
          %65 = vector.load %m0[%9, %63] : memref<4x16xf32>, vector<8xf32>
          %66 = vector.broadcast %31 : f32 to vector<8xf32>
          %67 = arith.subf %65, %66 : vector<8xf32>
          %68 = arith.mulf %67, %62 : vector<8xf32>
          %69 = vector.load %m1[%63] : memref<16xf32>, vector<8xf32>
          %70 = arith.mulf %68, %69 : vector<8xf32>
          %71 = vector.load %m2[%63] : memref<16xf32>, vector<8xf32>
          %72 = arith.addf %70, %71 : vector<8xf32>
          vector.store %72, %m4[%9, %63] : memref<4x16xf32>, vector<8xf32>
        }
      }
      scf.for %73 = %8 to %4 step %c2 {
        scf.for %75 = %c0 to %c4 step %c5 {
          vector.store %c3, %m4[%73, %75] : memref<4x16xf32>, vector<8xf32>
        }
      }
      return
    }
  }
}

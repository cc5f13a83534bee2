// castiron emit --kernel rms_norm --shape 16 --tokens 4 --isa avx2 --threads 2
// 73 lines, sha256 3f4e2ae2f50c5498ea6ceeb5a6e7ca4b2844eb9882e7b5578a132cea9459d4f9
stream.executable private @rms_norm_4x16_1em05_length_avx2_r4 {
  stream.executable.export public @rms_norm_4x16_1em05_length_avx2_r4_fn workgroups() -> (index, index, index) {
    %n = arith.constant 1 : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }
  builtin.module {
    func.func @rms_norm_4x16_1em05_length_avx2_r4_fn(%b0: !stream.binding, %b1: !stream.binding, %b2: !stream.binding, %b3: !stream.binding) attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
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
      %m2 = stream.binding.subspan %b2[%c0] : !stream.binding -> memref<i32>
      %m3 = stream.binding.subspan %b3[%c0] : !stream.binding -> memref<4x16xf32>
      %1 = stream.dispatch.workgroup.id[0] : index
      %2 = arith.muli %1, %c1 : index
      %3 = arith.addi %2, %c1 : index
      %4 = arith.minsi %3, %c1 : index
      %5 = memref.load %m2[] : memref<i32>
      %6 = arith.index_cast %5 : i32 to index
      %7 = arith.minsi %6, %4 : index
      %8 = arith.maxsi %7, %2 : index
      scf.for %9 = %2 to %8 step %c2 {
        %14:2 = scf.for %11 = %c0 to %c4 step %c4 iter_args(%12 = %c3, %13 = %c3) -> (vector<8xf32>, vector<8xf32>) {
          %15 = vector.load %m0[%9, %11] : memref<4x16xf32>, vector<8xf32>
          %16 = arith.mulf %15, %15 : vector<8xf32>
          %17 = arith.addf %12, %16 : vector<8xf32>
          %18 = arith.addi %11, %c5 : index
          %19 = vector.load %m0[%9, %18] : memref<4x16xf32>, vector<8xf32>
          %20 = arith.mulf %19, %19 : vector<8xf32>
          %21 = arith.addf %13, %20 : vector<8xf32>
          scf.yield %17, %21 : vector<8xf32>, vector<8xf32>
        }
        %22 = arith.addf %14#0, %14#1 : vector<8xf32>
        %23 = vector.shuffle %22, %22 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
        %24 = vector.shuffle %22, %22 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
        %25 = arith.addf %23, %24 : vector<4xf32>
        %26 = vector.shuffle %25, %25 [0, 1] : vector<4xf32>, vector<4xf32>
        %27 = vector.shuffle %25, %25 [2, 3] : vector<4xf32>, vector<4xf32>
        %28 = arith.addf %26, %27 : vector<2xf32>
        %29 = vector.shuffle %28, %28 [0] : vector<2xf32>, vector<2xf32>
        %30 = vector.shuffle %28, %28 [1] : vector<2xf32>, vector<2xf32>
        %31 = arith.addf %29, %30 : vector<1xf32>
        %32 = vector.extract %31[0] : f32 from vector<1xf32>
        %33 = arith.divf %32, %c6 : f32
        %34 = arith.addf %33, %c8 : f32
        %35 = math.sqrt %34 : f32
        %36 = arith.divf %c7, %35 : f32
        %37 = vector.broadcast %36 : f32 to vector<8xf32>
        scf.for %38 = %c0 to %c4 step %c5 {
          %40 = vector.load %m0[%9, %38] : memref<4x16xf32>, vector<8xf32>
          %41 = arith.mulf %40, %37 : vector<8xf32>
          %42 = vector.load %m1[%38] : memref<16xf32>, vector<8xf32>
          %43 = arith.mulf %41, %42 : vector<8xf32>
          vector.store %43, %m3[%9, %38] : memref<4x16xf32>, vector<8xf32>
        }
      }
      scf.for %44 = %8 to %4 step %c2 {
        scf.for %46 = %c0 to %c4 step %c5 {
          vector.store %c3, %m3[%44, %46] : memref<4x16xf32>, vector<8xf32>
        }
      }
      return
    }
  }
}

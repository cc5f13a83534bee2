// castiron emit --kernel causal_conv --shape 16x3 --tokens 4 --isa avx2 --threads 2
// 68 lines, sha256 faf7ca7b30a4889d56f15d3261e60048f3429983e78ed62a0ff333cd810d7138
stream.executable private @causal_conv_1_4_length_3x16_0of16_avx2 {
  stream.executable.export public @causal_conv_1_4_length_3x16_0of16_avx2_fn workgroups() -> (index, index, index) {
    %n = arith.constant 1 : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }
  builtin.module {
    func.func @causal_conv_1_4_length_3x16_0of16_avx2_fn(%b0: !stream.binding, %b1: !stream.binding, %b2: !stream.binding, %b3: !stream.binding, %b4: !stream.binding, %i0: index) attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 4 : index
      %c2 = arith.constant 512 : index
      %c3 = arith.constant 16 : index
      %c4 = arith.constant 8 : index
      %c5 = arith.constant 1 : index
      %c6 = arith.constant 2 : index
      %c7 = arith.constant dense<0x00000000> : vector<8xf32>
      %m0 = stream.binding.subspan %b0[%c0] : !stream.binding -> memref<4x16xf32>
      %m1 = stream.binding.subspan %b1[%c0] : !stream.binding -> memref<3x16xf32>
      %m2 = stream.binding.subspan %b2[%c0] : !stream.binding -> memref<i32>
      %m3 = stream.binding.subspan %b3[%c0] : !stream.binding -> memref<1x2x16xf32>
      %m4 = stream.binding.subspan %b4[%c0] : !stream.binding -> memref<4x16xf32>
      %1 = stream.dispatch.workgroup.id[0] : index
      %2 = memref.load %m2[] : memref<i32>
      %3 = arith.index_cast %2 : i32 to index
      %4 = arith.minsi %3, %c1 : index
      %5 = arith.maxsi %4, %c0 : index
      %6 = arith.muli %1, %c2 : index
      %7 = arith.addi %6, %c2 : index
      %8 = arith.minsi %7, %c3 : index
      scf.for %9 = %6 to %8 step %c3 {
        %11 = arith.addi %9, %c4 : index
        %12 = vector.load %m1[%c0, %9] : memref<3x16xf32>, vector<8xf32>
        %13 = vector.load %m1[%c0, %11] : memref<3x16xf32>, vector<8xf32>
        %14 = vector.load %m1[%c5, %9] : memref<3x16xf32>, vector<8xf32>
        %15 = vector.load %m1[%c5, %11] : memref<3x16xf32>, vector<8xf32>
        %16 = vector.load %m1[%c6, %9] : memref<3x16xf32>, vector<8xf32>
        %17 = vector.load %m1[%c6, %11] : memref<3x16xf32>, vector<8xf32>
        %18 = vector.load %m3[%i0, %c0, %9] : memref<1x2x16xf32>, vector<8xf32>
        %19 = vector.load %m3[%i0, %c0, %11] : memref<1x2x16xf32>, vector<8xf32>
        %20 = vector.load %m3[%i0, %c5, %9] : memref<1x2x16xf32>, vector<8xf32>
        %21 = vector.load %m3[%i0, %c5, %11] : memref<1x2x16xf32>, vector<8xf32>
        %27:4 = scf.for %22 = %c0 to %5 step %c5 iter_args(%23 = %18, %24 = %19, %25 = %20, %26 = %21) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
          %28 = vector.load %m0[%22, %9] : memref<4x16xf32>, vector<8xf32>
          %29 = vector.load %m0[%22, %11] : memref<4x16xf32>, vector<8xf32>
          %30 = arith.mulf %23, %12 : vector<8xf32>
          %31 = math.fma %25, %14, %30 : vector<8xf32>
          %32 = math.fma %28, %16, %31 : vector<8xf32>
          vector.store %32, %m4[%22, %9] : memref<4x16xf32>, vector<8xf32>
          %33 = arith.mulf %24, %13 : vector<8xf32>
          %34 = math.fma %26, %15, %33 : vector<8xf32>
          %35 = math.fma %29, %17, %34 : vector<8xf32>
          vector.store %35, %m4[%22, %11] : memref<4x16xf32>, vector<8xf32>
          scf.yield %25, %26, %28, %29 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
        }
        vector.store %27#0, %m3[%i0, %c0, %9] : memref<1x2x16xf32>, vector<8xf32>
        vector.store %27#1, %m3[%i0, %c0, %11] : memref<1x2x16xf32>, vector<8xf32>
        vector.store %27#2, %m3[%i0, %c5, %9] : memref<1x2x16xf32>, vector<8xf32>
        vector.store %27#3, %m3[%i0, %c5, %11] : memref<1x2x16xf32>, vector<8xf32>
      }
      scf.for %36 = %5 to %c1 step %c5 {
        scf.for %38 = %6 to %8 step %c4 {
          vector.store %c7, %m4[%36, %38] : memref<4x16xf32>, vector<8xf32>
        }
      }
      return
    }
  }
}

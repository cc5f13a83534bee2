// castiron emit --kernel embed --shape 16x8 --codec bf16 --isa avx2 --threads 2
// 75 lines, sha256 0ca4644ba05d738cd12764aced7bee88802a8af77a0b2cdf0b6ddc23907fb6a2
stream.executable private @embed_bf16_1_16x8_avx2 {
  stream.executable.export public @embed_bf16_1_16x8_avx2_fn workgroups() -> (index, index, index) {
    %n = arith.constant 1 : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }
  builtin.module {
    func.func @embed_bf16_1_16x8_avx2_fn(%b0: !stream.binding, %b1: !stream.binding, %b2: !stream.binding) attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
      %c0 = arith.constant 0 : index
      %1 = memref.alloca() alignment = 64 : memref<8x16xf32>
      %c1 = arith.constant 1 : index
      %c2 = arith.constant 15 : index
      %c3 = arith.constant 8 : index
      %c4 = arith.constant 16 : index
      %c5 = arith.constant 4 : index
      %c6 = arith.constant 2 : index
      %c7 = arith.constant dense<16> : vector<8xi32>
      %c8 = arith.constant dense<-65536> : vector<8xi32>
      %c9 = arith.constant 32 : index
      %m0 = stream.binding.subspan %b0[%c0] : !stream.binding -> memref<1xi32>
      %m1 = stream.binding.subspan %b1[%c0] : !stream.binding -> memref<1x4x64xi8>
      %m2 = stream.binding.subspan %b2[%c0] : !stream.binding -> memref<1x8xf32>
      %2 = stream.dispatch.workgroup.id[0] : index
      %3 = arith.addi %2, %c1 : index
      scf.for %4 = %2 to %3 step %c1 {
        %6 = memref.load %m0[%4] : memref<1xi32>
        %7 = arith.index_cast %6 : i32 to index
        %8 = arith.minsi %7, %c2 : index
        %9 = arith.maxsi %8, %c0 : index
        scf.for %10 = %c0 to %c3 step %c3 {
          %12 = arith.divui %9, %c4 : index
          scf.for %13 = %c0 to %c1 step %c1 {
            scf.for %15 = %c0 to %c5 step %c1 {
              %17 = arith.addi %12, %13 : index
              %18 = arith.muli %13, %c4 : index
              %19 = arith.divui %10, %c6 : index
              %20 = arith.addi %19, %15 : index
              %21 = vector.load %m1[%17, %20, %c0] : memref<1x4x64xi8>, vector<32xi8>
              %22 = vector.bitcast %21 : vector<32xi8> to vector<8xi32>
              %23 = arith.shli %22, %c7 : vector<8xi32>
              %24 = arith.andi %22, %c8 : vector<8xi32>
              %25 = vector.bitcast %23 : vector<8xi32> to vector<8xf32>
              %26 = vector.bitcast %24 : vector<8xi32> to vector<8xf32>
              %27 = vector.load %m1[%17, %20, %c9] : memref<1x4x64xi8>, vector<32xi8>
              %28 = vector.bitcast %27 : vector<32xi8> to vector<8xi32>
              %29 = arith.shli %28, %c7 : vector<8xi32>
              %30 = arith.andi %28, %c8 : vector<8xi32>
              %31 = vector.bitcast %29 : vector<8xi32> to vector<8xf32>
              %32 = vector.bitcast %30 : vector<8xi32> to vector<8xf32>
              %33 = arith.muli %15, %c6 : index
              vector.store %25, %1[%33, %18] : memref<8x16xf32>, vector<8xf32>
              %34 = arith.muli %15, %c6 : index
              %35 = arith.addi %34, %c1 : index
              vector.store %26, %1[%35, %18] : memref<8x16xf32>, vector<8xf32>
              %36 = arith.muli %15, %c6 : index
              %37 = arith.addi %18, %c3 : index
              vector.store %31, %1[%36, %37] : memref<8x16xf32>, vector<8xf32>
              %38 = arith.muli %15, %c6 : index
              %39 = arith.addi %38, %c1 : index
              %40 = arith.addi %18, %c3 : index
              vector.store %32, %1[%39, %40] : memref<8x16xf32>, vector<8xf32>
            }
          }
          scf.for %41 = %c0 to %c3 step %c1 {
            %43 = arith.remui %9, %c4 : index
            %44 = memref.load %1[%41, %43] : memref<8x16xf32>
            %45 = arith.addi %10, %41 : index
            memref.store %44, %m2[%4, %45] : memref<1x8xf32>
          }
        }
      }
      return
    }
  }
}

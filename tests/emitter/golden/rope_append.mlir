// castiron emit --kernel rope_append --shape 4x2x16 --context 64 --tokens 8 --isa avx2 --threads 2
// 95 lines, sha256 fe1c230c170fcda2f96683bf6cf8949307b5eaac40b833a1b10051d5c92c91a1
        scf.for %13 = %c0 to %c1 step %c3 {
          %15 = arith.muli %13, %c4 : index
          %16 = vector.load %m1[%12, %c0] : memref<64x8xf32>, vector<8xf32>
          %17 = vector.load %m2[%12, %c0] : memref<64x8xf32>, vector<8xf32>
          %18 = vector.load %m0[%10, %15] : memref<8x128xf32>, vector<8xf32>
          %19 = arith.addi %15, %c2 : index
          %20 = vector.load %m0[%10, %19] : memref<8x128xf32>, vector<8xf32>
          %21 = arith.mulf %18, %16 : vector<8xf32>
          %22 = llvm.call_intrinsic "llvm.arithmetic.fence"(%21) : (vector<8xf32>) -> vector<8xf32>
          %23 = arith.mulf %20, %17 : vector<8xf32>
          %24 = llvm.call_intrinsic "llvm.arithmetic.fence"(%23) : (vector<8xf32>) -> vector<8xf32>
          %25 = arith.subf %22, %24 : vector<8xf32>
          %26 = arith.mulf %20, %16 : vector<8xf32>
          %27 = llvm.call_intrinsic "llvm.arithmetic.fence"(%26) : (vector<8xf32>) -> vector<8xf32>
          %28 = arith.mulf %18, %17 : vector<8xf32>
          %29 = llvm.call_intrinsic "llvm.arithmetic.fence"(%28) : (vector<8xf32>) -> vector<8xf32>
          %30 = arith.addf %27, %29 : vector<8xf32>
          vector.store %25, %m7[%10, %15] : memref<8x64xf32>, vector<8xf32>
          %31 = arith.addi %15, %c2 : index
          vector.store %30, %m7[%10, %31] : memref<8x64xf32>, vector<8xf32>
        }

// castiron emit --kernel rms_norm --shape 16 --tokens 4 --isa avx2 --threads 2
// 75 lines, sha256 6bb8c233d049cf91cfb305bc5d4fa72db9cf45cc588bdad7f58101c9b93b1ac1
        scf.for %36 = %c0 to %c4 step %c8 {
          %38 = vector.load %m0[%9, %36] : memref<4x16xf32>, vector<8xf32>
          %39 = arith.mulf %38, %35 : vector<8xf32>
          %40 = llvm.call_intrinsic "llvm.arithmetic.fence"(%39) : (vector<8xf32>) -> vector<8xf32>
          %41 = vector.load %m1[%36] : memref<16xf32>, vector<8xf32>
          %42 = arith.mulf %40, %41 : vector<8xf32>
          %43 = llvm.call_intrinsic "llvm.arithmetic.fence"(%42) : (vector<8xf32>) -> vector<8xf32>
          vector.store %43, %m3[%9, %36] : memref<4x16xf32>, vector<8xf32>
        }

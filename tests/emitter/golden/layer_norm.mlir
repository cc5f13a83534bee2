// castiron emit --kernel layer_norm --shape 16 --tokens 4 --isa avx2 --threads 2
// 101 lines, sha256 15dd6b99285b8703a214126c77a872fd4363954b153043001b44d32cea0ebc48
        scf.for %57 = %c0 to %c4 step %c8 {
          %59 = vector.load %m0[%9, %57] : memref<4x16xf32>, vector<8xf32>
          %60 = vector.broadcast %29 : f32 to vector<8xf32>
          %61 = arith.subf %59, %60 : vector<8xf32>
          %62 = arith.mulf %61, %56 : vector<8xf32>
          %63 = llvm.call_intrinsic "llvm.arithmetic.fence"(%62) : (vector<8xf32>) -> vector<8xf32>
          %64 = vector.load %m1[%57] : memref<16xf32>, vector<8xf32>
          %65 = arith.mulf %63, %64 : vector<8xf32>
          %66 = llvm.call_intrinsic "llvm.arithmetic.fence"(%65) : (vector<8xf32>) -> vector<8xf32>
          %67 = vector.load %m2[%57] : memref<16xf32>, vector<8xf32>
          %68 = arith.addf %66, %67 : vector<8xf32>
          vector.store %68, %m4[%9, %57] : memref<4x16xf32>, vector<8xf32>
        }

// castiron emit --kernel rms_norm --shape 16 --tokens 4 --isa avx2 --threads 2
// 73 lines, sha256 3f4e2ae2f50c5498ea6ceeb5a6e7ca4b2844eb9882e7b5578a132cea9459d4f9
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

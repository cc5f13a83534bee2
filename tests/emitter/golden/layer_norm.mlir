// castiron emit --kernel layer_norm --shape 16 --tokens 4 --isa avx2 --threads 2
// 102 lines, sha256 8c7f648ca480d6f32b912b44b4511ad2441ad643cee614305e7c5ed49cf3ea85
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

// castiron emit --kernel experts --shape 2x16x64 --codec bf16 --tokens 9 --isa avx2 --threads 2
// 1870 lines, sha256 05e0c64891c6c3ac7b548065d6bf0b46714c911aeabebf9a9ee1cd30f3084496
                    %103:8 = scf.for %94 = %c0 to %c15 step %c12 iter_args(%95 = %c14, %96 = %c14, %97 = %c14, %98 = %c14, %99 = %c14, %100 = %c14, %101 = %c14, %102 = %c14) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                      %104 = arith.addi %79, %c4 : index
                      memref.prefetch %m1[%104, %94, %c0], read, locality<3>, data : memref<2x32x64xi8>
                      %105 = arith.addi %79, %c4 : index
                      memref.prefetch %m1[%105, %94, %c16], read, locality<3>, data : memref<2x32x64xi8>
                      %106 = arith.addi %79, %c4 : index
                      memref.prefetch %m1[%106, %94, %c17], read, locality<3>, data : memref<2x32x64xi8>
                      %107 = arith.addi %79, %c4 : index
                      memref.prefetch %m1[%107, %94, %c18], read, locality<3>, data : memref<2x32x64xi8>
                      %108 = arith.addi %79, %c4 : index
                      memref.prefetch %m1[%108, %94, %c19], read, locality<3>, data : memref<2x32x64xi8>
                      %109 = arith.addi %79, %c4 : index
                      memref.prefetch %m1[%109, %94, %c20], read, locality<3>, data : memref<2x32x64xi8>
                      %110 = arith.addi %79, %c4 : index
                      memref.prefetch %m1[%110, %94, %c21], read, locality<3>, data : memref<2x32x64xi8>
                      %111 = arith.addi %79, %c4 : index
                      memref.prefetch %m1[%111, %94, %c22], read, locality<3>, data : memref<2x32x64xi8>
                      %112 = vector.load %m1[%79, %94, %c0] : memref<2x32x64xi8>, vector<32xi8>
                      %113 = vector.bitcast %112 : vector<32xi8> to vector<8xi32>
                      %114 = arith.shli %113, %c23 : vector<8xi32>
                      %115 = arith.andi %113, %c24 : vector<8xi32>
                      %116 = vector.bitcast %114 : vector<8xi32> to vector<8xf32>
                      %117 = vector.bitcast %115 : vector<8xi32> to vector<8xf32>
                      %118 = vector.load %m1[%79, %94, %c15] : memref<2x32x64xi8>, vector<32xi8>
                      %119 = vector.bitcast %118 : vector<32xi8> to vector<8xi32>
                      %120 = arith.shli %119, %c23 : vector<8xi32>
                      %121 = arith.andi %119, %c24 : vector<8xi32>
                      %122 = vector.bitcast %120 : vector<8xi32> to vector<8xf32>
                      %123 = vector.bitcast %121 : vector<8xi32> to vector<8xf32>
                      %124 = arith.muli %94, %c3 : index
                      %125 = memref.load %m0[%84, %124] : memref<9x64xf32>
                      %126 = vector.broadcast %125 : f32 to vector<8xf32>
                      %127 = math.fma %126, %116, %95 : vector<8xf32>
                      %128 = math.fma %126, %122, %96 : vector<8xf32>
                      %129 = memref.load %m0[%87, %124] : memref<9x64xf32>
                      %130 = vector.broadcast %129 : f32 to vector<8xf32>
                      %131 = math.fma %130, %116, %97 : vector<8xf32>
                      %132 = math.fma %130, %122, %98 : vector<8xf32>
                      %133 = memref.load %m0[%90, %124] : memref<9x64xf32>
                      %134 = vector.broadcast %133 : f32 to vector<8xf32>
// 347 lines more
                      %482 = math.fma %480, %459, %464 : vector<8xf32>
                      %483 = memref.load %m0[%87, %478] : memref<9x64xf32>
                      %484 = vector.broadcast %483 : f32 to vector<8xf32>
                      %485 = math.fma %484, %453, %467 : vector<8xf32>
                      %486 = math.fma %484, %459, %468 : vector<8xf32>
                      %487 = memref.load %m0[%90, %478] : memref<9x64xf32>
                      %488 = vector.broadcast %487 : f32 to vector<8xf32>
                      %489 = math.fma %488, %453, %471 : vector<8xf32>
                      %490 = math.fma %488, %459, %472 : vector<8xf32>
                      %491 = memref.load %m0[%93, %478] : memref<9x64xf32>
                      %492 = vector.broadcast %491 : f32 to vector<8xf32>
                      %493 = math.fma %492, %453, %475 : vector<8xf32>
                      %494 = math.fma %492, %459, %476 : vector<8xf32>
                      scf.yield %481, %482, %485, %486, %489, %490, %493, %494 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                    }

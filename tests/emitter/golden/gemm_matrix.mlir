// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --isa amx --threads 2
// 374 lines, sha256 d104e3d7b3cd457bd7b7bc862040915d84504c8d395322fc1e5a839376f5af59
                  scf.for %270 = %c0 to %c2 step %c1 {
                    %272 = arith.muli %220, %c2 : index
                    %273 = arith.addi %272, %270 : index
                    %274 = arith.muli %222, %c2 : index
                    %275 = arith.addi %274, %270 : index
                    %276 = memref.load %m1[%275, %263] : memref<9x2xf32>
                    %277 = vector.broadcast %276 : f32 to vector<16xf32>
                    %278 = vector.load %4[%273, %267] : memref<9x16xf32>, vector<16xf32>
                    %279 = vector.load %5[%c0, %270, %c0] : memref<1x9x16xf32>, vector<16xf32>
                    %280 = math.fma %279, %268, %278 : vector<16xf32>
                    %281 = math.fma %269, %277, %280 : vector<16xf32>
                    vector.store %281, %4[%273, %267] : memref<9x16xf32>, vector<16xf32>
                  }

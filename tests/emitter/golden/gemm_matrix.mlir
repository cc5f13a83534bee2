// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --isa amx --threads 2
// 407 lines, sha256 2a2edcd52d58df0df0102b7af05a136c29b90473088270ca086befd37fbbeabd
                  scf.for %288 = %c0 to %c2 step %c1 {
                    %290 = arith.muli %224, %c2 : index
                    %291 = arith.addi %290, %288 : index
                    %292 = arith.muli %226, %c2 : index
                    %293 = arith.addi %292, %288 : index
                    %294 = memref.load %m1[%293, %281] : memref<9x2xf32>
                    %295 = vector.broadcast %294 : f32 to vector<16xf32>
                    %296 = vector.load %4[%291, %285] : memref<9x16xf32>, vector<16xf32>
                    %297 = vector.load %5[%c0, %288, %c0] : memref<1x9x16xf32>, vector<16xf32>
                    %298 = math.fma %297, %286, %296 : vector<16xf32>
                    %299 = math.fma %287, %295, %298 : vector<16xf32>
                    vector.store %299, %4[%291, %285] : memref<9x16xf32>, vector<16xf32>
                  }

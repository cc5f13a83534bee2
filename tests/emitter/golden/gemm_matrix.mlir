// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --isa amx --threads 2
// 372 lines, sha256 298224d71ede7e98e11db8a4a093faa69dd00befeec3e53fea19678de4d938ef
                  scf.for %268 = %c0 to %c2 step %c1 {
                    %270 = arith.muli %220, %c2 : index
                    %271 = arith.addi %270, %268 : index
                    %272 = arith.muli %222, %c2 : index
                    %273 = arith.addi %272, %268 : index
                    %274 = memref.load %m1[%273, %228] : memref<9x2xf32>
                    %275 = vector.broadcast %274 : f32 to vector<16xf32>
                    %276 = vector.load %4[%271, %265] : memref<9x16xf32>, vector<16xf32>
                    %277 = vector.load %5[%c0, %268, %c0] : memref<1x9x16xf32>, vector<16xf32>
                    %278 = math.fma %277, %266, %276 : vector<16xf32>
                    %279 = math.fma %267, %275, %278 : vector<16xf32>
                    vector.store %279, %4[%271, %265] : memref<9x16xf32>, vector<16xf32>
                  }

// castiron emit --kernel attention_decode --shape 4x2x16 --context 64 --isa avx2 --threads 2
// 1113 lines, sha256 a9e1d155070f105fe2bea4bccb1213f6542619b773f3696b61f42736ce5470e4
              scf.for %317 = %c0 to %218 step %c9 {
                %319 = vector.load %6[%216, %317] : memref<4x48xf32>, vector<16xf32>
                %320 = arith.subf %319, %272 : vector<16xf32>
                %321 = arith.cmpf ogt, %320, %c22 : vector<16xf32>
                %322 = arith.select %321, %320, %c22 : vector<16xi1>, vector<16xf32>
                %323 = arith.addf %322, %c23 : vector<16xf32>
                %324 = arith.subf %323, %c23 : vector<16xf32>
                %325 = arith.subf %322, %324 : vector<16xf32>
                %326 = math.fma %c24, %325, %c25 : vector<16xf32>
                %327 = math.fma %326, %325, %c26 : vector<16xf32>
                %328 = math.fma %327, %325, %c27 : vector<16xf32>
                %329 = math.fma %328, %325, %c28 : vector<16xf32>
                %330 = math.fma %329, %325, %c29 : vector<16xf32>
                %331 = math.fma %330, %325, %c30 : vector<16xf32>
                %332 = vector.bitcast %323 : vector<16xf32> to vector<16xi32>
                %333 = arith.shli %332, %c31 : vector<16xi32>
                %334 = arith.addi %333, %c32 : vector<16xi32>
                %335 = vector.bitcast %334 : vector<16xi32> to vector<16xf32>
                %336 = arith.mulf %331, %335 : vector<16xf32>
                %337 = llvm.call_intrinsic "llvm.arithmetic.fence"(%336) : (vector<16xf32>) -> vector<16xf32>
                vector.store %337, %6[%216, %317] : memref<4x48xf32>, vector<16xf32>
                %338 = vector.load %6[%217, %317] : memref<4x48xf32>, vector<16xf32>
                %339 = arith.subf %338, %316 : vector<16xf32>
                %340 = arith.cmpf ogt, %339, %c22 : vector<16xf32>
                %341 = arith.select %340, %339, %c22 : vector<16xi1>, vector<16xf32>
                %342 = arith.addf %341, %c23 : vector<16xf32>
                %343 = arith.subf %342, %c23 : vector<16xf32>
                %344 = arith.subf %341, %343 : vector<16xf32>
                %345 = math.fma %c24, %344, %c25 : vector<16xf32>
                %346 = math.fma %345, %344, %c26 : vector<16xf32>
                %347 = math.fma %346, %344, %c27 : vector<16xf32>
                %348 = math.fma %347, %344, %c28 : vector<16xf32>
                %349 = math.fma %348, %344, %c29 : vector<16xf32>
                %350 = math.fma %349, %344, %c30 : vector<16xf32>
                %351 = vector.bitcast %342 : vector<16xf32> to vector<16xi32>
                %352 = arith.shli %351, %c31 : vector<16xi32>
                %353 = arith.addi %352, %c32 : vector<16xi32>
                %354 = vector.bitcast %353 : vector<16xi32> to vector<16xf32>
                %355 = arith.mulf %350, %354 : vector<16xf32>
                %356 = llvm.call_intrinsic "llvm.arithmetic.fence"(%355) : (vector<16xf32>) -> vector<16xf32>
                vector.store %356, %6[%217, %317] : memref<4x48xf32>, vector<16xf32>
              }

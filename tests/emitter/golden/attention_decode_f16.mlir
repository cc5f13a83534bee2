// castiron emit --kernel attention_decode --shape 4x2x16 --context 64 --kv-cache-type f16 --isa avx2 --threads 2
// 1112 lines, sha256 d733adce6176e8eb6b2461c0556dae3df9270aff645af60dc5aa78941b17a511
              scf.for %322 = %c0 to %223 step %c9 {
                %324 = vector.load %6[%221, %322] : memref<4x48xf32>, vector<16xf32>
                %325 = arith.subf %324, %277 : vector<16xf32>
                %326 = arith.cmpf ogt, %325, %c22 : vector<16xf32>
                %327 = arith.select %326, %325, %c22 : vector<16xi1>, vector<16xf32>
                %328 = arith.addf %327, %c23 : vector<16xf32>
                %329 = arith.subf %328, %c23 : vector<16xf32>
                %330 = arith.subf %327, %329 : vector<16xf32>
                %331 = math.fma %c24, %330, %c25 : vector<16xf32>
                %332 = math.fma %331, %330, %c26 : vector<16xf32>
                %333 = math.fma %332, %330, %c27 : vector<16xf32>
                %334 = math.fma %333, %330, %c28 : vector<16xf32>
                %335 = math.fma %334, %330, %c29 : vector<16xf32>
                %336 = math.fma %335, %330, %c30 : vector<16xf32>
                %337 = vector.bitcast %328 : vector<16xf32> to vector<16xi32>
                %338 = arith.shli %337, %c31 : vector<16xi32>
                %339 = arith.addi %338, %c32 : vector<16xi32>
                %340 = vector.bitcast %339 : vector<16xi32> to vector<16xf32>
                %341 = arith.mulf %336, %340 : vector<16xf32>
                %342 = llvm.call_intrinsic "llvm.arithmetic.fence"(%341) : (vector<16xf32>) -> vector<16xf32>
                vector.store %342, %6[%221, %322] : memref<4x48xf32>, vector<16xf32>
                %343 = vector.load %6[%222, %322] : memref<4x48xf32>, vector<16xf32>
                %344 = arith.subf %343, %321 : vector<16xf32>
                %345 = arith.cmpf ogt, %344, %c22 : vector<16xf32>
                %346 = arith.select %345, %344, %c22 : vector<16xi1>, vector<16xf32>
                %347 = arith.addf %346, %c23 : vector<16xf32>
                %348 = arith.subf %347, %c23 : vector<16xf32>
                %349 = arith.subf %346, %348 : vector<16xf32>
                %350 = math.fma %c24, %349, %c25 : vector<16xf32>
                %351 = math.fma %350, %349, %c26 : vector<16xf32>
                %352 = math.fma %351, %349, %c27 : vector<16xf32>
                %353 = math.fma %352, %349, %c28 : vector<16xf32>
                %354 = math.fma %353, %349, %c29 : vector<16xf32>
                %355 = math.fma %354, %349, %c30 : vector<16xf32>
                %356 = vector.bitcast %347 : vector<16xf32> to vector<16xi32>
                %357 = arith.shli %356, %c31 : vector<16xi32>
                %358 = arith.addi %357, %c32 : vector<16xi32>
                %359 = vector.bitcast %358 : vector<16xi32> to vector<16xf32>
                %360 = arith.mulf %355, %359 : vector<16xf32>
                %361 = llvm.call_intrinsic "llvm.arithmetic.fence"(%360) : (vector<16xf32>) -> vector<16xf32>
                vector.store %361, %6[%222, %322] : memref<4x48xf32>, vector<16xf32>
              }

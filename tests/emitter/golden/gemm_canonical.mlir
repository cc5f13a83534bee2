// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --numerics canonical --isa avx2 --threads 2
// 798 lines, sha256 7b1efc257e6957ee62585bffde30a73a9dcbcc76d540f95ad300aa9da10cb272
                  %252:5 = scf.for %246 = %c0 to %c9 step %c29 iter_args(%247 = %c6, %248 = %c6, %249 = %c6, %250 = %c6, %251 = %c6) -> (vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>) {
                    %253 = arith.addi %245, %246 : index
                    %254 = vector.load %1[%253, %225] : memref<64x16xf32>, vector<16xf32>
                    %255 = arith.addi %19, %253 : index
                    %256 = memref.load %m0[%224, %255] : memref<9x64xf32>
                    %257 = vector.broadcast %256 : f32 to vector<16xf32>
                    %258 = math.fma %257, %254, %247 : vector<16xf32>
                    %259 = arith.addi %224, %c1 : index
                    %260 = arith.addi %19, %253 : index
                    %261 = memref.load %m0[%259, %260] : memref<9x64xf32>
                    %262 = vector.broadcast %261 : f32 to vector<16xf32>
                    %263 = math.fma %262, %254, %248 : vector<16xf32>
                    %264 = arith.addi %224, %c8 : index
                    %265 = arith.addi %19, %253 : index
                    %266 = memref.load %m0[%264, %265] : memref<9x64xf32>
                    %267 = vector.broadcast %266 : f32 to vector<16xf32>
                    %268 = math.fma %267, %254, %249 : vector<16xf32>
                    %269 = arith.addi %224, %c18 : index
                    %270 = arith.addi %19, %253 : index
                    %271 = memref.load %m0[%269, %270] : memref<9x64xf32>
                    %272 = vector.broadcast %271 : f32 to vector<16xf32>
                    %273 = math.fma %272, %254, %250 : vector<16xf32>
                    %274 = arith.addi %224, %c4 : index
                    %275 = arith.addi %19, %253 : index
                    %276 = memref.load %m0[%274, %275] : memref<9x64xf32>
                    %277 = vector.broadcast %276 : f32 to vector<16xf32>
                    %278 = math.fma %277, %254, %251 : vector<16xf32>
                    %279 = arith.addi %246, %c1 : index
                    %280 = arith.addi %245, %279 : index
                    %281 = vector.load %1[%280, %225] : memref<64x16xf32>, vector<16xf32>
                    %282 = arith.addi %19, %280 : index
                    %283 = memref.load %m0[%224, %282] : memref<9x64xf32>
                    %284 = vector.broadcast %283 : f32 to vector<16xf32>
                    %285 = math.fma %284, %281, %258 : vector<16xf32>
                    %286 = arith.addi %224, %c1 : index
                    %287 = arith.addi %19, %280 : index
                    %288 = memref.load %m0[%286, %287] : memref<9x64xf32>
                    %289 = vector.broadcast %288 : f32 to vector<16xf32>
                    %290 = math.fma %289, %281, %263 : vector<16xf32>
                    %291 = arith.addi %224, %c8 : index
// 163 lines more
                    %455 = memref.load %m0[%453, %454] : memref<9x64xf32>
                    %456 = vector.broadcast %455 : f32 to vector<16xf32>
                    %457 = math.fma %456, %443, %430 : vector<16xf32>
                    %458 = arith.addi %224, %c18 : index
                    %459 = arith.addi %19, %442 : index
                    %460 = memref.load %m0[%458, %459] : memref<9x64xf32>
                    %461 = vector.broadcast %460 : f32 to vector<16xf32>
                    %462 = math.fma %461, %443, %435 : vector<16xf32>
                    %463 = arith.addi %224, %c4 : index
                    %464 = arith.addi %19, %442 : index
                    %465 = memref.load %m0[%463, %464] : memref<9x64xf32>
                    %466 = vector.broadcast %465 : f32 to vector<16xf32>
                    %467 = math.fma %466, %443, %440 : vector<16xf32>
                    scf.yield %447, %452, %457, %462, %467 : vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>
                  }

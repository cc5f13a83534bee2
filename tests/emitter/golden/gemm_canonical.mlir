// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --numerics canonical --isa avx2 --threads 2
// 817 lines, sha256 01fe3bff93c5e0d8f7dc99bf7fb3efcc826b911f9eb7ae3da62e7bc2da83aed6
                  %265:5 = scf.for %259 = %c0 to %c9 step %c29 iter_args(%260 = %c6, %261 = %c6, %262 = %c6, %263 = %c6, %264 = %c6) -> (vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>) {
                    %266 = arith.addi %258, %259 : index
                    %267 = vector.load %1[%266, %238] : memref<64x16xf32>, vector<16xf32>
                    %268 = arith.addi %19, %266 : index
                    %269 = memref.load %m0[%237, %268] : memref<9x64xf32>
                    %270 = vector.broadcast %269 : f32 to vector<16xf32>
                    %271 = math.fma %270, %267, %260 : vector<16xf32>
                    %272 = arith.addi %237, %c1 : index
                    %273 = arith.addi %19, %266 : index
                    %274 = memref.load %m0[%272, %273] : memref<9x64xf32>
                    %275 = vector.broadcast %274 : f32 to vector<16xf32>
                    %276 = math.fma %275, %267, %261 : vector<16xf32>
                    %277 = arith.addi %237, %c8 : index
                    %278 = arith.addi %19, %266 : index
                    %279 = memref.load %m0[%277, %278] : memref<9x64xf32>
                    %280 = vector.broadcast %279 : f32 to vector<16xf32>
                    %281 = math.fma %280, %267, %262 : vector<16xf32>
                    %282 = arith.addi %237, %c18 : index
                    %283 = arith.addi %19, %266 : index
                    %284 = memref.load %m0[%282, %283] : memref<9x64xf32>
                    %285 = vector.broadcast %284 : f32 to vector<16xf32>
                    %286 = math.fma %285, %267, %263 : vector<16xf32>
                    %287 = arith.addi %237, %c4 : index
                    %288 = arith.addi %19, %266 : index
                    %289 = memref.load %m0[%287, %288] : memref<9x64xf32>
                    %290 = vector.broadcast %289 : f32 to vector<16xf32>
                    %291 = math.fma %290, %267, %264 : vector<16xf32>
                    %292 = arith.addi %259, %c1 : index
                    %293 = arith.addi %258, %292 : index
                    %294 = vector.load %1[%293, %238] : memref<64x16xf32>, vector<16xf32>
                    %295 = arith.addi %19, %293 : index
                    %296 = memref.load %m0[%237, %295] : memref<9x64xf32>
                    %297 = vector.broadcast %296 : f32 to vector<16xf32>
                    %298 = math.fma %297, %294, %271 : vector<16xf32>
                    %299 = arith.addi %237, %c1 : index
                    %300 = arith.addi %19, %293 : index
                    %301 = memref.load %m0[%299, %300] : memref<9x64xf32>
                    %302 = vector.broadcast %301 : f32 to vector<16xf32>
                    %303 = math.fma %302, %294, %276 : vector<16xf32>
                    %304 = arith.addi %237, %c8 : index
// 163 lines more
                    %468 = memref.load %m0[%466, %467] : memref<9x64xf32>
                    %469 = vector.broadcast %468 : f32 to vector<16xf32>
                    %470 = math.fma %469, %456, %443 : vector<16xf32>
                    %471 = arith.addi %237, %c18 : index
                    %472 = arith.addi %19, %455 : index
                    %473 = memref.load %m0[%471, %472] : memref<9x64xf32>
                    %474 = vector.broadcast %473 : f32 to vector<16xf32>
                    %475 = math.fma %474, %456, %448 : vector<16xf32>
                    %476 = arith.addi %237, %c4 : index
                    %477 = arith.addi %19, %455 : index
                    %478 = memref.load %m0[%476, %477] : memref<9x64xf32>
                    %479 = vector.broadcast %478 : f32 to vector<16xf32>
                    %480 = math.fma %479, %456, %453 : vector<16xf32>
                    scf.yield %460, %465, %470, %475, %480 : vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>
                  }

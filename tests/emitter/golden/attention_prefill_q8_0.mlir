// castiron emit --kernel attention_prefill --shape 4x2x16 --context 64 --tokens 8 --kv-cache-type q8_0 --isa avx2 --threads 2
// 805 lines, sha256 09f13c4e2c62d9535ed29cb9e0ac4eeac75836df80b3e3f406f7703be0f555da
                %297:12 = scf.for %284 = %c0 to %c3 step %c7 iter_args(%285 = %187, %286 = %188, %287 = %189, %288 = %190, %289 = %191, %290 = %192, %291 = %193, %292 = %194, %293 = %195, %294 = %196, %295 = %197, %296 = %198) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %298 = arith.addi %186, %284 : index
                  %299 = vector.load %1[%298, %c0] : memref<16x16xf32>, vector<8xf32>
                  %300 = vector.load %1[%298, %c4] : memref<16x16xf32>, vector<8xf32>
                  %301 = memref.load %9[%c0, %284] : memref<6x16xf32>
                  %302 = vector.broadcast %301 : f32 to vector<8xf32>
                  %303 = math.fma %302, %299, %285 : vector<8xf32>
                  %304 = math.fma %302, %300, %286 : vector<8xf32>
                  %305 = memref.load %9[%c1, %284] : memref<6x16xf32>
                  %306 = vector.broadcast %305 : f32 to vector<8xf32>
                  %307 = math.fma %306, %299, %287 : vector<8xf32>
                  %308 = math.fma %306, %300, %288 : vector<8xf32>
                  %309 = memref.load %9[%c2, %284] : memref<6x16xf32>
                  %310 = vector.broadcast %309 : f32 to vector<8xf32>
                  %311 = math.fma %310, %299, %289 : vector<8xf32>
                  %312 = math.fma %310, %300, %290 : vector<8xf32>
                  %313 = memref.load %9[%c6, %284] : memref<6x16xf32>
                  %314 = vector.broadcast %313 : f32 to vector<8xf32>
                  %315 = math.fma %314, %299, %291 : vector<8xf32>
                  %316 = math.fma %314, %300, %292 : vector<8xf32>
                  %317 = memref.load %9[%c7, %284] : memref<6x16xf32>
                  %318 = vector.broadcast %317 : f32 to vector<8xf32>
                  %319 = math.fma %318, %299, %293 : vector<8xf32>
                  %320 = math.fma %318, %300, %294 : vector<8xf32>
                  %321 = memref.load %9[%c8, %284] : memref<6x16xf32>
                  %322 = vector.broadcast %321 : f32 to vector<8xf32>
                  %323 = math.fma %322, %299, %295 : vector<8xf32>
                  %324 = math.fma %322, %300, %296 : vector<8xf32>
                  %325 = arith.addi %284, %c1 : index
                  %326 = arith.addi %186, %325 : index
                  %327 = vector.load %1[%326, %c0] : memref<16x16xf32>, vector<8xf32>
                  %328 = vector.load %1[%326, %c4] : memref<16x16xf32>, vector<8xf32>
                  %329 = memref.load %9[%c0, %325] : memref<6x16xf32>
                  %330 = vector.broadcast %329 : f32 to vector<8xf32>
                  %331 = math.fma %330, %327, %303 : vector<8xf32>
                  %332 = math.fma %330, %328, %304 : vector<8xf32>
                  %333 = memref.load %9[%c1, %325] : memref<6x16xf32>
                  %334 = vector.broadcast %333 : f32 to vector<8xf32>
                  %335 = math.fma %334, %327, %307 : vector<8xf32>
                  %336 = math.fma %334, %328, %308 : vector<8xf32>
// 59 lines more
                  %396 = math.fma %394, %384, %368 : vector<8xf32>
                  %397 = memref.load %9[%c6, %381] : memref<6x16xf32>
                  %398 = vector.broadcast %397 : f32 to vector<8xf32>
                  %399 = math.fma %398, %383, %371 : vector<8xf32>
                  %400 = math.fma %398, %384, %372 : vector<8xf32>
                  %401 = memref.load %9[%c7, %381] : memref<6x16xf32>
                  %402 = vector.broadcast %401 : f32 to vector<8xf32>
                  %403 = math.fma %402, %383, %375 : vector<8xf32>
                  %404 = math.fma %402, %384, %376 : vector<8xf32>
                  %405 = memref.load %9[%c8, %381] : memref<6x16xf32>
                  %406 = vector.broadcast %405 : f32 to vector<8xf32>
                  %407 = math.fma %406, %383, %379 : vector<8xf32>
                  %408 = math.fma %406, %384, %380 : vector<8xf32>
                  scf.yield %387, %388, %391, %392, %395, %396, %399, %400, %403, %404, %407, %408 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }

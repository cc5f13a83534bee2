// castiron emit --kernel attention_prefill --shape 4x2x16 --context 64 --tokens 8 --kv-cache-type f16 --isa avx2 --threads 2
// 710 lines, sha256 f7023ef483eedb81984f4e2e01dc3ccaa4cd313fa3e8c92d80331f4ece077278
                %243:12 = scf.for %230 = %c0 to %c3 step %c7 iter_args(%231 = %187, %232 = %188, %233 = %189, %234 = %190, %235 = %191, %236 = %192, %237 = %193, %238 = %194, %239 = %195, %240 = %196, %241 = %197, %242 = %198) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %244 = arith.addi %186, %230 : index
                  %245 = vector.load %1[%244, %c0] : memref<16x16xf32>, vector<8xf32>
                  %246 = vector.load %1[%244, %c4] : memref<16x16xf32>, vector<8xf32>
                  %247 = memref.load %9[%c0, %230] : memref<6x16xf32>
                  %248 = vector.broadcast %247 : f32 to vector<8xf32>
                  %249 = math.fma %248, %245, %231 : vector<8xf32>
                  %250 = math.fma %248, %246, %232 : vector<8xf32>
                  %251 = memref.load %9[%c1, %230] : memref<6x16xf32>
                  %252 = vector.broadcast %251 : f32 to vector<8xf32>
                  %253 = math.fma %252, %245, %233 : vector<8xf32>
                  %254 = math.fma %252, %246, %234 : vector<8xf32>
                  %255 = memref.load %9[%c2, %230] : memref<6x16xf32>
                  %256 = vector.broadcast %255 : f32 to vector<8xf32>
                  %257 = math.fma %256, %245, %235 : vector<8xf32>
                  %258 = math.fma %256, %246, %236 : vector<8xf32>
                  %259 = memref.load %9[%c6, %230] : memref<6x16xf32>
                  %260 = vector.broadcast %259 : f32 to vector<8xf32>
                  %261 = math.fma %260, %245, %237 : vector<8xf32>
                  %262 = math.fma %260, %246, %238 : vector<8xf32>
                  %263 = memref.load %9[%c7, %230] : memref<6x16xf32>
                  %264 = vector.broadcast %263 : f32 to vector<8xf32>
                  %265 = math.fma %264, %245, %239 : vector<8xf32>
                  %266 = math.fma %264, %246, %240 : vector<8xf32>
                  %267 = memref.load %9[%c8, %230] : memref<6x16xf32>
                  %268 = vector.broadcast %267 : f32 to vector<8xf32>
                  %269 = math.fma %268, %245, %241 : vector<8xf32>
                  %270 = math.fma %268, %246, %242 : vector<8xf32>
                  %271 = arith.addi %230, %c1 : index
                  %272 = arith.addi %186, %271 : index
                  %273 = vector.load %1[%272, %c0] : memref<16x16xf32>, vector<8xf32>
                  %274 = vector.load %1[%272, %c4] : memref<16x16xf32>, vector<8xf32>
                  %275 = memref.load %9[%c0, %271] : memref<6x16xf32>
                  %276 = vector.broadcast %275 : f32 to vector<8xf32>
                  %277 = math.fma %276, %273, %249 : vector<8xf32>
                  %278 = math.fma %276, %274, %250 : vector<8xf32>
                  %279 = memref.load %9[%c1, %271] : memref<6x16xf32>
                  %280 = vector.broadcast %279 : f32 to vector<8xf32>
                  %281 = math.fma %280, %273, %253 : vector<8xf32>
                  %282 = math.fma %280, %274, %254 : vector<8xf32>
// 59 lines more
                  %342 = math.fma %340, %330, %314 : vector<8xf32>
                  %343 = memref.load %9[%c6, %327] : memref<6x16xf32>
                  %344 = vector.broadcast %343 : f32 to vector<8xf32>
                  %345 = math.fma %344, %329, %317 : vector<8xf32>
                  %346 = math.fma %344, %330, %318 : vector<8xf32>
                  %347 = memref.load %9[%c7, %327] : memref<6x16xf32>
                  %348 = vector.broadcast %347 : f32 to vector<8xf32>
                  %349 = math.fma %348, %329, %321 : vector<8xf32>
                  %350 = math.fma %348, %330, %322 : vector<8xf32>
                  %351 = memref.load %9[%c8, %327] : memref<6x16xf32>
                  %352 = vector.broadcast %351 : f32 to vector<8xf32>
                  %353 = math.fma %352, %329, %325 : vector<8xf32>
                  %354 = math.fma %352, %330, %326 : vector<8xf32>
                  scf.yield %333, %334, %337, %338, %341, %342, %345, %346, %349, %350, %353, %354 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }

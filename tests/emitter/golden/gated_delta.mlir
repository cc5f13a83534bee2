// castiron emit --kernel gated_delta --shape 1x2x16x16 --tokens 4 --isa avx2 --threads 2
// 368 lines, sha256 4f6dd0939413a45d17a92ef205041d60ee5815780d2ca29ebd13bb341f7e2257
          %232:2 = scf.for %229 = %c0 to %c3 step %c1 iter_args(%230 = %c21, %231 = %c21) -> (vector<8xf32>, vector<8xf32>) {
            %233 = arith.addi %8, %229 : index
            %234 = memref.load %m1[%156, %233] : memref<4x16xf32>
            %235 = vector.broadcast %234 : f32 to vector<8xf32>
            %236 = arith.addi %7, %229 : index
            %237 = memref.load %m0[%156, %236] : memref<4x16xf32>
            %238 = vector.broadcast %237 : f32 to vector<8xf32>
            %239 = vector.load %148[%229, %c0] : memref<16x16xf32>, vector<8xf32>
            %240 = arith.mulf %239, %211 : vector<8xf32>
            %241 = math.fma %235, %219, %240 : vector<8xf32>
            vector.store %241, %148[%229, %c0] : memref<16x16xf32>, vector<8xf32>
            %242 = math.fma %238, %241, %230 : vector<8xf32>
            %243 = vector.load %148[%229, %c22] : memref<16x16xf32>, vector<8xf32>
            %244 = arith.mulf %243, %211 : vector<8xf32>
            %245 = math.fma %235, %228, %244 : vector<8xf32>
            vector.store %245, %148[%229, %c22] : memref<16x16xf32>, vector<8xf32>
            %246 = math.fma %238, %245, %231 : vector<8xf32>
            %247 = arith.addi %229, %c4 : index
            %248 = arith.addi %8, %247 : index
            %249 = memref.load %m1[%156, %248] : memref<4x16xf32>
            %250 = vector.broadcast %249 : f32 to vector<8xf32>
            %251 = arith.addi %7, %247 : index
            %252 = memref.load %m0[%156, %251] : memref<4x16xf32>
            %253 = vector.broadcast %252 : f32 to vector<8xf32>
            %254 = vector.load %148[%247, %c0] : memref<16x16xf32>, vector<8xf32>
            %255 = arith.mulf %254, %211 : vector<8xf32>
            %256 = math.fma %250, %219, %255 : vector<8xf32>
            vector.store %256, %148[%247, %c0] : memref<16x16xf32>, vector<8xf32>
            %257 = math.fma %253, %256, %242 : vector<8xf32>
            %258 = vector.load %148[%247, %c22] : memref<16x16xf32>, vector<8xf32>
            %259 = arith.mulf %258, %211 : vector<8xf32>
            %260 = math.fma %250, %228, %259 : vector<8xf32>
            vector.store %260, %148[%247, %c22] : memref<16x16xf32>, vector<8xf32>
            %261 = math.fma %253, %260, %246 : vector<8xf32>
            %262 = arith.addi %229, %c2 : index
            %263 = arith.addi %8, %262 : index
            %264 = memref.load %m1[%156, %263] : memref<4x16xf32>
            %265 = vector.broadcast %264 : f32 to vector<8xf32>
            %266 = arith.addi %7, %262 : index
            %267 = memref.load %m0[%156, %266] : memref<4x16xf32>
// 15 lines more
            %281 = arith.addi %7, %277 : index
            %282 = memref.load %m0[%156, %281] : memref<4x16xf32>
            %283 = vector.broadcast %282 : f32 to vector<8xf32>
            %284 = vector.load %148[%277, %c0] : memref<16x16xf32>, vector<8xf32>
            %285 = arith.mulf %284, %211 : vector<8xf32>
            %286 = math.fma %280, %219, %285 : vector<8xf32>
            vector.store %286, %148[%277, %c0] : memref<16x16xf32>, vector<8xf32>
            %287 = math.fma %283, %286, %272 : vector<8xf32>
            %288 = vector.load %148[%277, %c22] : memref<16x16xf32>, vector<8xf32>
            %289 = arith.mulf %288, %211 : vector<8xf32>
            %290 = math.fma %280, %228, %289 : vector<8xf32>
            vector.store %290, %148[%277, %c22] : memref<16x16xf32>, vector<8xf32>
            %291 = math.fma %283, %290, %276 : vector<8xf32>
            scf.yield %287, %291 : vector<8xf32>, vector<8xf32>
          }

// castiron emit --kernel gated_delta --shape 1x2x16x16 --tokens 4 --isa avx2 --threads 2
// 388 lines, sha256 ced2d216d393741f08b24f45647c56553ed00395301ed0c898944a483411a9ec
          %239:2 = scf.for %236 = %c0 to %c3 step %c1 iter_args(%237 = %c26, %238 = %c26) -> (vector<8xf32>, vector<8xf32>) {
            %240 = arith.addi %8, %236 : index
            %241 = memref.load %m1[%157, %240] : memref<4x16xf32>
            %242 = vector.broadcast %241 : f32 to vector<8xf32>
            %243 = arith.addi %7, %236 : index
            %244 = memref.load %m0[%157, %243] : memref<4x16xf32>
            %245 = vector.broadcast %244 : f32 to vector<8xf32>
            %246 = vector.load %149[%236, %c0] : memref<16x16xf32>, vector<8xf32>
            %247 = arith.mulf %246, %214 : vector<8xf32>
            %248 = llvm.call_intrinsic "llvm.arithmetic.fence"(%247) : (vector<8xf32>) -> vector<8xf32>
            %249 = math.fma %242, %224, %248 : vector<8xf32>
            vector.store %249, %149[%236, %c0] : memref<16x16xf32>, vector<8xf32>
            %250 = math.fma %245, %249, %237 : vector<8xf32>
            %251 = vector.load %149[%236, %c25] : memref<16x16xf32>, vector<8xf32>
            %252 = arith.mulf %251, %214 : vector<8xf32>
            %253 = llvm.call_intrinsic "llvm.arithmetic.fence"(%252) : (vector<8xf32>) -> vector<8xf32>
            %254 = math.fma %242, %235, %253 : vector<8xf32>
            vector.store %254, %149[%236, %c25] : memref<16x16xf32>, vector<8xf32>
            %255 = math.fma %245, %254, %238 : vector<8xf32>
            %256 = arith.addi %236, %c4 : index
            %257 = arith.addi %8, %256 : index
            %258 = memref.load %m1[%157, %257] : memref<4x16xf32>
            %259 = vector.broadcast %258 : f32 to vector<8xf32>
            %260 = arith.addi %7, %256 : index
            %261 = memref.load %m0[%157, %260] : memref<4x16xf32>
            %262 = vector.broadcast %261 : f32 to vector<8xf32>
            %263 = vector.load %149[%256, %c0] : memref<16x16xf32>, vector<8xf32>
            %264 = arith.mulf %263, %214 : vector<8xf32>
            %265 = llvm.call_intrinsic "llvm.arithmetic.fence"(%264) : (vector<8xf32>) -> vector<8xf32>
            %266 = math.fma %259, %224, %265 : vector<8xf32>
            vector.store %266, %149[%256, %c0] : memref<16x16xf32>, vector<8xf32>
            %267 = math.fma %262, %266, %250 : vector<8xf32>
            %268 = vector.load %149[%256, %c25] : memref<16x16xf32>, vector<8xf32>
            %269 = arith.mulf %268, %214 : vector<8xf32>
            %270 = llvm.call_intrinsic "llvm.arithmetic.fence"(%269) : (vector<8xf32>) -> vector<8xf32>
            %271 = math.fma %259, %235, %270 : vector<8xf32>
            vector.store %271, %149[%256, %c25] : memref<16x16xf32>, vector<8xf32>
            %272 = math.fma %262, %271, %255 : vector<8xf32>
            %273 = arith.addi %236, %c2 : index
            %274 = arith.addi %8, %273 : index
// 23 lines more
            %296 = vector.broadcast %295 : f32 to vector<8xf32>
            %297 = vector.load %149[%290, %c0] : memref<16x16xf32>, vector<8xf32>
            %298 = arith.mulf %297, %214 : vector<8xf32>
            %299 = llvm.call_intrinsic "llvm.arithmetic.fence"(%298) : (vector<8xf32>) -> vector<8xf32>
            %300 = math.fma %293, %224, %299 : vector<8xf32>
            vector.store %300, %149[%290, %c0] : memref<16x16xf32>, vector<8xf32>
            %301 = math.fma %296, %300, %284 : vector<8xf32>
            %302 = vector.load %149[%290, %c25] : memref<16x16xf32>, vector<8xf32>
            %303 = arith.mulf %302, %214 : vector<8xf32>
            %304 = llvm.call_intrinsic "llvm.arithmetic.fence"(%303) : (vector<8xf32>) -> vector<8xf32>
            %305 = math.fma %293, %235, %304 : vector<8xf32>
            vector.store %305, %149[%290, %c25] : memref<16x16xf32>, vector<8xf32>
            %306 = math.fma %296, %305, %289 : vector<8xf32>
            scf.yield %301, %306 : vector<8xf32>, vector<8xf32>
          }

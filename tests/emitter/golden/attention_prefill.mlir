// castiron emit --kernel attention_prefill --shape 4x2x16 --context 64 --tokens 8 --isa avx2 --threads 2
// 664 lines, sha256 1e1cb4a78c2d6bb5103e67a5f9c54ef71e41f380cd5f9241240654250f178ebe
              %198:12 = scf.for %185 = %c0 to %c3 step %c7 iter_args(%186 = %c5, %187 = %c5, %188 = %c5, %189 = %c5, %190 = %c5, %191 = %c5, %192 = %c5, %193 = %c5, %194 = %c5, %195 = %c5, %196 = %c5, %197 = %c5) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                %199 = vector.load %1[%185, %c0] : memref<16x16xf32>, vector<8xf32>
                %200 = vector.load %1[%185, %c4] : memref<16x16xf32>, vector<8xf32>
                %201 = memref.load %m3[%i0, %162, %29, %185] : memref<1x64x2x16xf32>
                %202 = vector.broadcast %201 : f32 to vector<8xf32>
                %203 = math.fma %202, %199, %186 : vector<8xf32>
                %204 = math.fma %202, %200, %187 : vector<8xf32>
                %205 = memref.load %m3[%i0, %164, %29, %185] : memref<1x64x2x16xf32>
                %206 = vector.broadcast %205 : f32 to vector<8xf32>
                %207 = math.fma %206, %199, %188 : vector<8xf32>
                %208 = math.fma %206, %200, %189 : vector<8xf32>
                %209 = memref.load %m3[%i0, %166, %29, %185] : memref<1x64x2x16xf32>
                %210 = vector.broadcast %209 : f32 to vector<8xf32>
                %211 = math.fma %210, %199, %190 : vector<8xf32>
                %212 = math.fma %210, %200, %191 : vector<8xf32>
                %213 = memref.load %m3[%i0, %168, %29, %185] : memref<1x64x2x16xf32>
                %214 = vector.broadcast %213 : f32 to vector<8xf32>
                %215 = math.fma %214, %199, %192 : vector<8xf32>
                %216 = math.fma %214, %200, %193 : vector<8xf32>
                %217 = memref.load %m3[%i0, %170, %29, %185] : memref<1x64x2x16xf32>
                %218 = vector.broadcast %217 : f32 to vector<8xf32>
                %219 = math.fma %218, %199, %194 : vector<8xf32>
                %220 = math.fma %218, %200, %195 : vector<8xf32>
                %221 = memref.load %m3[%i0, %172, %29, %185] : memref<1x64x2x16xf32>
                %222 = vector.broadcast %221 : f32 to vector<8xf32>
                %223 = math.fma %222, %199, %196 : vector<8xf32>
                %224 = math.fma %222, %200, %197 : vector<8xf32>
                %225 = arith.addi %185, %c1 : index
                %226 = vector.load %1[%225, %c0] : memref<16x16xf32>, vector<8xf32>
                %227 = vector.load %1[%225, %c4] : memref<16x16xf32>, vector<8xf32>
                %228 = memref.load %m3[%i0, %162, %29, %225] : memref<1x64x2x16xf32>
                %229 = vector.broadcast %228 : f32 to vector<8xf32>
                %230 = math.fma %229, %226, %203 : vector<8xf32>
                %231 = math.fma %229, %227, %204 : vector<8xf32>
                %232 = memref.load %m3[%i0, %164, %29, %225] : memref<1x64x2x16xf32>
                %233 = vector.broadcast %232 : f32 to vector<8xf32>
                %234 = math.fma %233, %226, %207 : vector<8xf32>
                %235 = math.fma %233, %227, %208 : vector<8xf32>
                %236 = memref.load %m3[%i0, %166, %29, %225] : memref<1x64x2x16xf32>
                %237 = vector.broadcast %236 : f32 to vector<8xf32>
// 55 lines more
                %293 = math.fma %291, %281, %266 : vector<8xf32>
                %294 = memref.load %m3[%i0, %168, %29, %279] : memref<1x64x2x16xf32>
                %295 = vector.broadcast %294 : f32 to vector<8xf32>
                %296 = math.fma %295, %280, %269 : vector<8xf32>
                %297 = math.fma %295, %281, %270 : vector<8xf32>
                %298 = memref.load %m3[%i0, %170, %29, %279] : memref<1x64x2x16xf32>
                %299 = vector.broadcast %298 : f32 to vector<8xf32>
                %300 = math.fma %299, %280, %273 : vector<8xf32>
                %301 = math.fma %299, %281, %274 : vector<8xf32>
                %302 = memref.load %m3[%i0, %172, %29, %279] : memref<1x64x2x16xf32>
                %303 = vector.broadcast %302 : f32 to vector<8xf32>
                %304 = math.fma %303, %280, %277 : vector<8xf32>
                %305 = math.fma %303, %281, %278 : vector<8xf32>
                scf.yield %284, %285, %288, %289, %292, %293, %296, %297, %300, %301, %304, %305 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
              }

// castiron emit --kernel attention_decode --shape 4x2x16 --context 64 --kv-cache-type q8_0 --isa avx2 --threads 2
// 1300 lines, sha256 afd4571e98f46a0985fefbcc2d8f0794f66f896db2f51aba1d1efbb50d8ece36
              scf.for %404 = %c0 to %305 step %c9 {
                %406 = vector.load %6[%303, %404] : memref<4x48xf32>, vector<16xf32>
                %407 = arith.subf %406, %359 : vector<16xf32>
                %408 = arith.cmpf ogt, %407, %c26 : vector<16xf32>
                %409 = arith.select %408, %407, %c26 : vector<16xi1>, vector<16xf32>
                %410 = arith.addf %409, %c16 : vector<16xf32>
                %411 = arith.subf %410, %c16 : vector<16xf32>
                %412 = arith.subf %409, %411 : vector<16xf32>
                %413 = math.fma %c27, %412, %c28 : vector<16xf32>
                %414 = math.fma %413, %412, %c29 : vector<16xf32>
                %415 = math.fma %414, %412, %c30 : vector<16xf32>
                %416 = math.fma %415, %412, %c31 : vector<16xf32>
                %417 = math.fma %416, %412, %c32 : vector<16xf32>
                %418 = math.fma %417, %412, %c33 : vector<16xf32>
                %419 = vector.bitcast %410 : vector<16xf32> to vector<16xi32>
                %420 = arith.shli %419, %c34 : vector<16xi32>
                %421 = arith.addi %420, %c35 : vector<16xi32>
                %422 = vector.bitcast %421 : vector<16xi32> to vector<16xf32>
                %423 = arith.mulf %418, %422 : vector<16xf32>
                %424 = llvm.call_intrinsic "llvm.arithmetic.fence"(%423) : (vector<16xf32>) -> vector<16xf32>
                vector.store %424, %6[%303, %404] : memref<4x48xf32>, vector<16xf32>
                %425 = vector.load %6[%304, %404] : memref<4x48xf32>, vector<16xf32>
                %426 = arith.subf %425, %403 : vector<16xf32>
                %427 = arith.cmpf ogt, %426, %c26 : vector<16xf32>
                %428 = arith.select %427, %426, %c26 : vector<16xi1>, vector<16xf32>
                %429 = arith.addf %428, %c16 : vector<16xf32>
                %430 = arith.subf %429, %c16 : vector<16xf32>
                %431 = arith.subf %428, %430 : vector<16xf32>
                %432 = math.fma %c27, %431, %c28 : vector<16xf32>
                %433 = math.fma %432, %431, %c29 : vector<16xf32>
                %434 = math.fma %433, %431, %c30 : vector<16xf32>
                %435 = math.fma %434, %431, %c31 : vector<16xf32>
                %436 = math.fma %435, %431, %c32 : vector<16xf32>
                %437 = math.fma %436, %431, %c33 : vector<16xf32>
                %438 = vector.bitcast %429 : vector<16xf32> to vector<16xi32>
                %439 = arith.shli %438, %c34 : vector<16xi32>
                %440 = arith.addi %439, %c35 : vector<16xi32>
                %441 = vector.bitcast %440 : vector<16xi32> to vector<16xf32>
                %442 = arith.mulf %437, %441 : vector<16xf32>
                %443 = llvm.call_intrinsic "llvm.arithmetic.fence"(%442) : (vector<16xf32>) -> vector<16xf32>
                vector.store %443, %6[%304, %404] : memref<4x48xf32>, vector<16xf32>
              }

// castiron emit --kernel attention_prefill --shape 4x2x16 --context 64 --tokens 8 --kv-cache-type q8_0 --isa avx2 --threads 2
// 898 lines, sha256 e1c76071d74732f4b17e285e6d62b4fc15e9767aa6e5c40c8a9f87e99f2238fe
              %474:2 = scf.for %471 = %c0 to %186 step %c1 iter_args(%472 = %449, %473 = %470) -> (vector<8xf32>, vector<8xf32>) {
                %475 = vector.load %2[%471, %c0] : memref<48x16xf32>, vector<8xf32>
                %476 = arith.subf %475, %422#0 : vector<8xf32>
                %477 = arith.cmpf ogt, %476, %c18 : vector<8xf32>
                %478 = arith.select %477, %476, %c18 : vector<8xi1>, vector<8xf32>
                %479 = arith.addf %478, %c19 : vector<8xf32>
                %480 = arith.subf %479, %c19 : vector<8xf32>
                %481 = arith.subf %478, %480 : vector<8xf32>
                %482 = math.fma %c20, %481, %c21 : vector<8xf32>
                %483 = math.fma %482, %481, %c22 : vector<8xf32>
                %484 = math.fma %483, %481, %c23 : vector<8xf32>
                %485 = math.fma %484, %481, %c24 : vector<8xf32>
                %486 = math.fma %485, %481, %c25 : vector<8xf32>
                %487 = math.fma %486, %481, %c26 : vector<8xf32>
                %488 = vector.bitcast %479 : vector<8xf32> to vector<8xi32>
                %489 = arith.shli %488, %c27 : vector<8xi32>
                %490 = arith.addi %489, %c28 : vector<8xi32>
                %491 = vector.bitcast %490 : vector<8xi32> to vector<8xf32>
                %492 = arith.mulf %487, %491 : vector<8xf32>
                %493 = llvm.call_intrinsic "llvm.arithmetic.fence"(%492) : (vector<8xf32>) -> vector<8xf32>
                vector.store %493, %2[%471, %c0] : memref<48x16xf32>, vector<8xf32>
                %494 = arith.addf %472, %493 : vector<8xf32>
                %495 = vector.load %2[%471, %c4] : memref<48x16xf32>, vector<8xf32>
                %496 = arith.subf %495, %422#1 : vector<8xf32>
                %497 = arith.cmpf ogt, %496, %c18 : vector<8xf32>
                %498 = arith.select %497, %496, %c18 : vector<8xi1>, vector<8xf32>
                %499 = arith.addf %498, %c19 : vector<8xf32>
                %500 = arith.subf %499, %c19 : vector<8xf32>
                %501 = arith.subf %498, %500 : vector<8xf32>
                %502 = math.fma %c20, %501, %c21 : vector<8xf32>
                %503 = math.fma %502, %501, %c22 : vector<8xf32>
                %504 = math.fma %503, %501, %c23 : vector<8xf32>
                %505 = math.fma %504, %501, %c24 : vector<8xf32>
                %506 = math.fma %505, %501, %c25 : vector<8xf32>
                %507 = math.fma %506, %501, %c26 : vector<8xf32>
                %508 = vector.bitcast %499 : vector<8xf32> to vector<8xi32>
                %509 = arith.shli %508, %c27 : vector<8xi32>
                %510 = arith.addi %509, %c28 : vector<8xi32>
                %511 = vector.bitcast %510 : vector<8xi32> to vector<8xf32>
                %512 = arith.mulf %507, %511 : vector<8xf32>
                %513 = llvm.call_intrinsic "llvm.arithmetic.fence"(%512) : (vector<8xf32>) -> vector<8xf32>
                vector.store %513, %2[%471, %c4] : memref<48x16xf32>, vector<8xf32>
                %514 = arith.addf %473, %513 : vector<8xf32>
                scf.yield %494, %514 : vector<8xf32>, vector<8xf32>
              }

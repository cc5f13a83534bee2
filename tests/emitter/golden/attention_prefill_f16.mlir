// castiron emit --kernel attention_prefill --shape 4x2x16 --context 64 --tokens 8 --kv-cache-type f16 --isa avx2 --threads 2
// 825 lines, sha256 37c715d42a6cc5cf2a84a6dadaf9e76ca043a3658fd399e5dbe4a12ef0e8af5f
              %444:2 = scf.for %441 = %c0 to %186 step %c1 iter_args(%442 = %419, %443 = %440) -> (vector<8xf32>, vector<8xf32>) {
                %445 = vector.load %2[%441, %c0] : memref<48x16xf32>, vector<8xf32>
                %446 = arith.subf %445, %392#0 : vector<8xf32>
                %447 = arith.cmpf ogt, %446, %c17 : vector<8xf32>
                %448 = arith.select %447, %446, %c17 : vector<8xi1>, vector<8xf32>
                %449 = arith.addf %448, %c18 : vector<8xf32>
                %450 = arith.subf %449, %c18 : vector<8xf32>
                %451 = arith.subf %448, %450 : vector<8xf32>
                %452 = math.fma %c19, %451, %c20 : vector<8xf32>
                %453 = math.fma %452, %451, %c21 : vector<8xf32>
                %454 = math.fma %453, %451, %c22 : vector<8xf32>
                %455 = math.fma %454, %451, %c23 : vector<8xf32>
                %456 = math.fma %455, %451, %c24 : vector<8xf32>
                %457 = math.fma %456, %451, %c25 : vector<8xf32>
                %458 = vector.bitcast %449 : vector<8xf32> to vector<8xi32>
                %459 = arith.shli %458, %c26 : vector<8xi32>
                %460 = arith.addi %459, %c27 : vector<8xi32>
                %461 = vector.bitcast %460 : vector<8xi32> to vector<8xf32>
                %462 = arith.mulf %457, %461 : vector<8xf32>
                %463 = llvm.call_intrinsic "llvm.arithmetic.fence"(%462) : (vector<8xf32>) -> vector<8xf32>
                vector.store %463, %2[%441, %c0] : memref<48x16xf32>, vector<8xf32>
                %464 = arith.addf %442, %463 : vector<8xf32>
                %465 = vector.load %2[%441, %c4] : memref<48x16xf32>, vector<8xf32>
                %466 = arith.subf %465, %392#1 : vector<8xf32>
                %467 = arith.cmpf ogt, %466, %c17 : vector<8xf32>
                %468 = arith.select %467, %466, %c17 : vector<8xi1>, vector<8xf32>
                %469 = arith.addf %468, %c18 : vector<8xf32>
                %470 = arith.subf %469, %c18 : vector<8xf32>
                %471 = arith.subf %468, %470 : vector<8xf32>
                %472 = math.fma %c19, %471, %c20 : vector<8xf32>
                %473 = math.fma %472, %471, %c21 : vector<8xf32>
                %474 = math.fma %473, %471, %c22 : vector<8xf32>
                %475 = math.fma %474, %471, %c23 : vector<8xf32>
                %476 = math.fma %475, %471, %c24 : vector<8xf32>
                %477 = math.fma %476, %471, %c25 : vector<8xf32>
                %478 = vector.bitcast %469 : vector<8xf32> to vector<8xi32>
                %479 = arith.shli %478, %c26 : vector<8xi32>
                %480 = arith.addi %479, %c27 : vector<8xi32>
                %481 = vector.bitcast %480 : vector<8xi32> to vector<8xf32>
                %482 = arith.mulf %477, %481 : vector<8xf32>
                %483 = llvm.call_intrinsic "llvm.arithmetic.fence"(%482) : (vector<8xf32>) -> vector<8xf32>
                vector.store %483, %2[%441, %c4] : memref<48x16xf32>, vector<8xf32>
                %484 = arith.addf %443, %483 : vector<8xf32>
                scf.yield %464, %484 : vector<8xf32>, vector<8xf32>
              }

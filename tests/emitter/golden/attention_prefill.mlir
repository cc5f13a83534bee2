// castiron emit --kernel attention_prefill --shape 4x2x16 --context 64 --tokens 8 --isa avx2 --threads 2
// 804 lines, sha256 5d7a4d0cf5aa33b9478623e455d8fe2351977ad797995f44ed21186b0bc73e7f
              %431:2 = scf.for %428 = %c0 to %185 step %c1 iter_args(%429 = %406, %430 = %427) -> (vector<8xf32>, vector<8xf32>) {
                %432 = vector.load %2[%428, %c0] : memref<48x16xf32>, vector<8xf32>
                %433 = arith.subf %432, %379#0 : vector<8xf32>
                %434 = arith.cmpf ogt, %433, %c17 : vector<8xf32>
                %435 = arith.select %434, %433, %c17 : vector<8xi1>, vector<8xf32>
                %436 = arith.addf %435, %c18 : vector<8xf32>
                %437 = arith.subf %436, %c18 : vector<8xf32>
                %438 = arith.subf %435, %437 : vector<8xf32>
                %439 = math.fma %c19, %438, %c20 : vector<8xf32>
                %440 = math.fma %439, %438, %c21 : vector<8xf32>
                %441 = math.fma %440, %438, %c22 : vector<8xf32>
                %442 = math.fma %441, %438, %c23 : vector<8xf32>
                %443 = math.fma %442, %438, %c24 : vector<8xf32>
                %444 = math.fma %443, %438, %c25 : vector<8xf32>
                %445 = vector.bitcast %436 : vector<8xf32> to vector<8xi32>
                %446 = arith.shli %445, %c26 : vector<8xi32>
                %447 = arith.addi %446, %c27 : vector<8xi32>
                %448 = vector.bitcast %447 : vector<8xi32> to vector<8xf32>
                %449 = arith.mulf %444, %448 : vector<8xf32>
                %450 = llvm.call_intrinsic "llvm.arithmetic.fence"(%449) : (vector<8xf32>) -> vector<8xf32>
                vector.store %450, %2[%428, %c0] : memref<48x16xf32>, vector<8xf32>
                %451 = arith.addf %429, %450 : vector<8xf32>
                %452 = vector.load %2[%428, %c4] : memref<48x16xf32>, vector<8xf32>
                %453 = arith.subf %452, %379#1 : vector<8xf32>
                %454 = arith.cmpf ogt, %453, %c17 : vector<8xf32>
                %455 = arith.select %454, %453, %c17 : vector<8xi1>, vector<8xf32>
                %456 = arith.addf %455, %c18 : vector<8xf32>
                %457 = arith.subf %456, %c18 : vector<8xf32>
                %458 = arith.subf %455, %457 : vector<8xf32>
                %459 = math.fma %c19, %458, %c20 : vector<8xf32>
                %460 = math.fma %459, %458, %c21 : vector<8xf32>
                %461 = math.fma %460, %458, %c22 : vector<8xf32>
                %462 = math.fma %461, %458, %c23 : vector<8xf32>
                %463 = math.fma %462, %458, %c24 : vector<8xf32>
                %464 = math.fma %463, %458, %c25 : vector<8xf32>
                %465 = vector.bitcast %456 : vector<8xf32> to vector<8xi32>
                %466 = arith.shli %465, %c26 : vector<8xi32>
                %467 = arith.addi %466, %c27 : vector<8xi32>
                %468 = vector.bitcast %467 : vector<8xi32> to vector<8xf32>
                %469 = arith.mulf %464, %468 : vector<8xf32>
                %470 = llvm.call_intrinsic "llvm.arithmetic.fence"(%469) : (vector<8xf32>) -> vector<8xf32>
                vector.store %470, %2[%428, %c4] : memref<48x16xf32>, vector<8xf32>
                %471 = arith.addf %430, %470 : vector<8xf32>
                scf.yield %451, %471 : vector<8xf32>, vector<8xf32>
              }

// castiron emit --kernel attention_decode --shape 4x2x16 --context 64 --isa avx2 --threads 2
// 1097 lines, sha256 2af6cb90bcb1addc5fd0f6299f3c2e044d6ed93f910b05c77f0cb839aa40b5ce
                %498:8 = scf.for %489 = %c0 to %c9 step %c9 iter_args(%490 = %c12, %491 = %c12, %492 = %c12, %493 = %c12, %494 = %c12, %495 = %c12, %496 = %c12, %497 = %c12) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %499 = arith.addi %483, %c8 : index
                  %500 = arith.addi %483, %c2 : index
                  %501 = arith.addi %483, %c20 : index
                  %502 = arith.subi %481, %12 : index
                  %503 = arith.muli %502, %c4 : index
                  %504 = arith.divui %489, %c9 : index
                  %505 = arith.muli %504, %c4 : index
                  %506 = arith.addi %503, %505 : index
                  %507 = arith.muli %i0, %c13 : index
                  %508 = arith.addi %507, %485 : index
                  %509 = arith.muli %508, %c38 : index
                  %510 = arith.addi %509, %506 : index
                  %511 = arith.index_cast %510 : index to i64
                  %512 = arith.addi %31, %511 : i64
                  %513 = llvm.inttoptr %512 : i64 to !llvm.ptr
                  %514 = llvm.load volatile %513 : !llvm.ptr -> i32
                  %515 = arith.addi %506, %c13 : index
                  %516 = arith.addi %509, %515 : index
                  %517 = arith.index_cast %516 : index to i64
                  %518 = arith.addi %31, %517 : i64
                  %519 = llvm.inttoptr %518 : i64 to !llvm.ptr
                  %520 = llvm.load volatile %519 : !llvm.ptr -> i32
                  %521 = arith.muli %i0, %c13 : index
                  %522 = arith.addi %521, %483 : index
                  %523 = arith.muli %522, %c38 : index
                  %524 = arith.addi %523, %506 : index
                  %525 = arith.index_cast %524 : index to i64
                  %526 = arith.addi %33, %525 : i64
                  %527 = llvm.inttoptr %526 : i64 to !llvm.ptr
                  %528 = llvm.load volatile %527 : !llvm.ptr -> i32
                  %529 = arith.addi %506, %c13 : index
                  %530 = arith.addi %523, %529 : index
                  %531 = arith.index_cast %530 : index to i64
                  %532 = arith.addi %33, %531 : i64
                  %533 = llvm.inttoptr %532 : i64 to !llvm.ptr
                  %534 = llvm.load volatile %533 : !llvm.ptr -> i32
                  %535 = vector.load %4[%487, %489] : memref<4x16xf32>, vector<8xf32>
                  %536 = vector.load %4[%488, %489] : memref<4x16xf32>, vector<8xf32>
                  %537 = vector.load %m4[%i0, %483, %481, %489] : memref<1x64x2x16xf32>, vector<8xf32>
// 53 lines more
                  %591 = math.fma %589, %587, %539 : vector<8xf32>
                  %592 = arith.addi %489, %c1 : index
                  %593 = vector.load %m4[%i0, %499, %481, %592] : memref<1x64x2x16xf32>, vector<8xf32>
                  %594 = math.fma %593, %585, %541 : vector<8xf32>
                  %595 = math.fma %593, %587, %542 : vector<8xf32>
                  %596 = arith.addi %489, %c1 : index
                  %597 = vector.load %m4[%i0, %500, %481, %596] : memref<1x64x2x16xf32>, vector<8xf32>
                  %598 = math.fma %597, %585, %544 : vector<8xf32>
                  %599 = math.fma %597, %587, %545 : vector<8xf32>
                  %600 = arith.addi %489, %c1 : index
                  %601 = vector.load %m4[%i0, %501, %481, %600] : memref<1x64x2x16xf32>, vector<8xf32>
                  %602 = math.fma %601, %585, %547 : vector<8xf32>
                  %603 = math.fma %601, %587, %548 : vector<8xf32>
                  scf.yield %590, %591, %594, %595, %598, %599, %602, %603 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }

// castiron emit --kernel attention_decode --shape 4x2x16 --context 64 --kv-cache-type f16 --isa avx2 --threads 2
// 1101 lines, sha256 d355d6627049f0a2c84495a25dea44421c549e0665633bac4103597c78ce3785
                %514:8 = scf.for %505 = %c0 to %c9 step %c9 iter_args(%506 = %c12, %507 = %c12, %508 = %c12, %509 = %c12, %510 = %c12, %511 = %c12, %512 = %c12, %513 = %c12) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %515 = arith.addi %499, %c8 : index
                  %516 = arith.addi %499, %c2 : index
                  %517 = arith.addi %499, %c20 : index
                  %518 = arith.subi %497, %12 : index
                  %519 = arith.muli %518, %c38 : index
                  %520 = arith.divui %505, %c9 : index
                  %521 = arith.muli %520, %c38 : index
                  %522 = arith.addi %519, %521 : index
                  %523 = arith.muli %i0, %c13 : index
                  %524 = arith.addi %523, %501 : index
                  %525 = arith.muli %524, %c13 : index
                  %526 = arith.addi %525, %522 : index
                  %527 = arith.index_cast %526 : index to i64
                  %528 = arith.addi %31, %527 : i64
                  %529 = llvm.inttoptr %528 : i64 to !llvm.ptr
                  %530 = llvm.load volatile %529 : !llvm.ptr -> i32
                  %531 = arith.muli %i0, %c13 : index
                  %532 = arith.addi %531, %499 : index
                  %533 = arith.muli %532, %c13 : index
                  %534 = arith.addi %533, %522 : index
                  %535 = arith.index_cast %534 : index to i64
                  %536 = arith.addi %33, %535 : i64
                  %537 = llvm.inttoptr %536 : i64 to !llvm.ptr
                  %538 = llvm.load volatile %537 : !llvm.ptr -> i32
                  %539 = vector.load %4[%503, %505] : memref<4x16xf32>, vector<8xf32>
                  %540 = vector.load %4[%504, %505] : memref<4x16xf32>, vector<8xf32>
                  %541 = vector.load %m4[%i0, %499, %497, %505] : memref<1x64x2x16xf16>, vector<8xf16>
                  %542 = arith.extf %541 : vector<8xf16> to vector<8xf32>
                  %543 = math.fma %542, %539, %506 : vector<8xf32>
                  %544 = math.fma %542, %540, %507 : vector<8xf32>
                  %545 = vector.load %m4[%i0, %515, %497, %505] : memref<1x64x2x16xf16>, vector<8xf16>
                  %546 = arith.extf %545 : vector<8xf16> to vector<8xf32>
                  %547 = math.fma %546, %539, %508 : vector<8xf32>
                  %548 = math.fma %546, %540, %509 : vector<8xf32>
                  %549 = vector.load %m4[%i0, %516, %497, %505] : memref<1x64x2x16xf16>, vector<8xf16>
                  %550 = arith.extf %549 : vector<8xf16> to vector<8xf32>
                  %551 = math.fma %550, %539, %510 : vector<8xf32>
                  %552 = math.fma %550, %540, %511 : vector<8xf32>
                  %553 = vector.load %m4[%i0, %517, %497, %505] : memref<1x64x2x16xf16>, vector<8xf16>
// 37 lines more
                  %591 = arith.extf %590 : vector<8xf16> to vector<8xf32>
                  %592 = math.fma %591, %581, %547 : vector<8xf32>
                  %593 = math.fma %591, %583, %548 : vector<8xf32>
                  %594 = arith.addi %505, %c1 : index
                  %595 = vector.load %m4[%i0, %516, %497, %594] : memref<1x64x2x16xf16>, vector<8xf16>
                  %596 = arith.extf %595 : vector<8xf16> to vector<8xf32>
                  %597 = math.fma %596, %581, %551 : vector<8xf32>
                  %598 = math.fma %596, %583, %552 : vector<8xf32>
                  %599 = arith.addi %505, %c1 : index
                  %600 = vector.load %m4[%i0, %517, %497, %599] : memref<1x64x2x16xf16>, vector<8xf16>
                  %601 = arith.extf %600 : vector<8xf16> to vector<8xf32>
                  %602 = math.fma %601, %581, %555 : vector<8xf32>
                  %603 = math.fma %601, %583, %556 : vector<8xf32>
                  scf.yield %587, %588, %592, %593, %597, %598, %602, %603 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }

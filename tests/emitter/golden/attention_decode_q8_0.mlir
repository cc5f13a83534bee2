// castiron emit --kernel attention_decode --shape 4x2x16 --context 64 --kv-cache-type q8_0 --isa avx2 --threads 2
// 1273 lines, sha256 bcdea02bb5e18c3b3e48861142ade1401addf5304977ac31d51e6eb731565e1e
                %637:8 = scf.for %628 = %c0 to %c9 step %c9 iter_args(%629 = %c12, %630 = %c12, %631 = %c12, %632 = %c12, %633 = %c12, %634 = %c12, %635 = %c12, %636 = %c12) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %638 = arith.addi %622, %c8 : index
                  %639 = arith.addi %622, %c2 : index
                  %640 = arith.addi %622, %c25 : index
                  %641 = arith.divui %628, %c9 : index
                  %642 = arith.divui %628, %c9 : index
                  %643 = arith.divui %628, %c9 : index
                  %644 = arith.divui %628, %c9 : index
                  %645 = arith.subi %620, %12 : index
                  %646 = arith.muli %645, %c42 : index
                  %647 = arith.divui %628, %c9 : index
                  %648 = arith.muli %647, %c42 : index
                  %649 = arith.addi %646, %648 : index
                  %650 = arith.muli %i0, %c13 : index
                  %651 = arith.addi %650, %624 : index
                  %652 = arith.muli %651, %c43 : index
                  %653 = arith.addi %652, %649 : index
                  %654 = arith.index_cast %653 : index to i64
                  %655 = arith.addi %31, %654 : i64
                  %656 = llvm.inttoptr %655 : i64 to !llvm.ptr
                  %657 = llvm.load volatile %656 : !llvm.ptr -> i32
                  %658 = arith.addi %649, %c13 : index
                  %659 = arith.addi %652, %658 : index
                  %660 = arith.index_cast %659 : index to i64
                  %661 = arith.addi %31, %660 : i64
                  %662 = llvm.inttoptr %661 : i64 to !llvm.ptr
                  %663 = llvm.load volatile %662 : !llvm.ptr -> i32
                  %664 = arith.muli %i0, %c13 : index
                  %665 = arith.addi %664, %622 : index
                  %666 = arith.muli %665, %c43 : index
                  %667 = arith.addi %666, %649 : index
                  %668 = arith.index_cast %667 : index to i64
                  %669 = arith.addi %33, %668 : i64
                  %670 = llvm.inttoptr %669 : i64 to !llvm.ptr
                  %671 = llvm.load volatile %670 : !llvm.ptr -> i32
                  %672 = arith.addi %649, %c13 : index
                  %673 = arith.addi %666, %672 : index
                  %674 = arith.index_cast %673 : index to i64
                  %675 = arith.addi %33, %674 : i64
                  %676 = llvm.inttoptr %675 : i64 to !llvm.ptr
// 58 lines more
                  %735 = vector.broadcast %734 : f32 to vector<8xf32>
                  %736 = vector.load %m4[%i0, %640, %620, %644, %c18] : memref<1x64x2x1x20xi8>, vector<8xi8>
                  %737 = arith.extsi %736 : vector<8xi8> to vector<8xi32>
                  %738 = arith.sitofp %737 : vector<8xi32> to vector<8xf32>
                  %739 = arith.mulf %738, %735 : vector<8xf32>
                  %740 = math.fma %739, %678, %635 : vector<8xf32>
                  %741 = math.fma %739, %679, %636 : vector<8xf32>
                  %742 = vector.load %m4[%i0, %640, %620, %644, %c19] : memref<1x64x2x1x20xi8>, vector<8xi8>
                  %743 = arith.extsi %742 : vector<8xi8> to vector<8xi32>
                  %744 = arith.sitofp %743 : vector<8xi32> to vector<8xf32>
                  %745 = arith.mulf %744, %735 : vector<8xf32>
                  %746 = math.fma %745, %681, %740 : vector<8xf32>
                  %747 = math.fma %745, %683, %741 : vector<8xf32>
                  scf.yield %698, %699, %714, %715, %730, %731, %746, %747 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }

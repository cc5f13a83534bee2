// castiron emit --kernel experts --shape 2x16x64 --codec q4_1 --tokens 9 --numerics fast --isa avx2 --threads 2
// 1857 lines, sha256 c225b88e15afdce9004f5dcf4f92504525a6933f58cf3f9de4476a63cd1ee342
                      %990:12 = scf.for %977 = %c0 to %c3 step %c4 iter_args(%978 = %965, %979 = %966, %980 = %967, %981 = %968, %982 = %969, %983 = %970, %984 = %971, %985 = %972, %986 = %973, %987 = %974, %988 = %975, %989 = %976) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                        %991 = arith.muli %977, %c12 : index
                        %992 = vector.load %2[%977, %952] : memref<2x16xf32>, vector<8xf32>
                        %993 = vector.load %3[%977, %952] : memref<2x16xf32>, vector<8xf32>
                        %994 = vector.load %2[%977, %954] : memref<2x16xf32>, vector<8xf32>
                        %995 = vector.load %3[%977, %954] : memref<2x16xf32>, vector<8xf32>
                        %996 = arith.divui %865, %c19 : index
                        %997 = arith.addi %996, %977 : index
                        %998 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %999 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1000 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1001 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1002 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1003 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1004 = vector.load %1[%991, %952] : memref<16x16xi32>, vector<8xi32>
                        %1005 = vector.load %1[%991, %954] : memref<16x16xi32>, vector<8xi32>
                        %1006 = vector.bitcast %1004 : vector<8xi32> to vector<32xi8>
                        %1007 = vector.bitcast %1005 : vector<8xi32> to vector<32xi8>
                        %1008 = arith.muli %997, %c12 : index
                        %1009 = memref.load %m0[%936, %1008] : memref<9x16xi32>
                        %1010 = vector.broadcast %1009 : i32 to vector<8xi32>
                        %1011 = vector.bitcast %1010 : vector<8xi32> to vector<32xi8>
                        %1012 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1006, %1011) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1013 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1007, %1011) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1014 = memref.load %m0[%939, %1008] : memref<9x16xi32>
                        %1015 = vector.broadcast %1014 : i32 to vector<8xi32>
                        %1016 = vector.bitcast %1015 : vector<8xi32> to vector<32xi8>
                        %1017 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1006, %1016) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1018 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1007, %1016) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1019 = memref.load %m0[%942, %1008] : memref<9x16xi32>
                        %1020 = vector.broadcast %1019 : i32 to vector<8xi32>
                        %1021 = vector.bitcast %1020 : vector<8xi32> to vector<32xi8>
                        %1022 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1006, %1021) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1023 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1007, %1021) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1024 = memref.load %m0[%945, %1008] : memref<9x16xi32>
                        %1025 = vector.broadcast %1024 : i32 to vector<8xi32>
                        %1026 = vector.bitcast %1025 : vector<8xi32> to vector<32xi8>
                        %1027 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1006, %1026) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1028 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1007, %1026) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1029 = memref.load %m0[%948, %1008] : memref<9x16xi32>
// 466 lines more
                        %1496 = memref.load %m1[%951, %997] : memref<9x2xf32>
                        %1497 = vector.broadcast %1496 : f32 to vector<8xf32>
                        %1498 = math.fma %1495, %1497, %988 : vector<8xf32>
                        %1499 = memref.load %m2[%951, %997] : memref<9x2xf32>
                        %1500 = vector.broadcast %1499 : f32 to vector<8xf32>
                        %1501 = math.fma %993, %1500, %1498 : vector<8xf32>
                        %1502 = arith.mulf %1424, %994 : vector<8xf32>
                        %1503 = memref.load %m1[%951, %997] : memref<9x2xf32>
                        %1504 = vector.broadcast %1503 : f32 to vector<8xf32>
                        %1505 = math.fma %1502, %1504, %989 : vector<8xf32>
                        %1506 = memref.load %m2[%951, %997] : memref<9x2xf32>
                        %1507 = vector.broadcast %1506 : f32 to vector<8xf32>
                        %1508 = math.fma %995, %1507, %1505 : vector<8xf32>
                        scf.yield %1431, %1438, %1445, %1452, %1459, %1466, %1473, %1480, %1487, %1494, %1501, %1508 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                      }

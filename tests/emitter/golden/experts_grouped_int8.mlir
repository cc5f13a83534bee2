// castiron emit --kernel experts --shape 2x16x64 --codec q4_1 --tokens 9 --numerics fast --isa avx2 --threads 2
// 1959 lines, sha256 d38e76c2f6b7b40b850e974c08410df4989e6dd105bf436b55f731928c6ca3eb
                      %1042:12 = scf.for %1029 = %c0 to %c3 step %c4 iter_args(%1030 = %1017, %1031 = %1018, %1032 = %1019, %1033 = %1020, %1034 = %1021, %1035 = %1022, %1036 = %1023, %1037 = %1024, %1038 = %1025, %1039 = %1026, %1040 = %1027, %1041 = %1028) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                        %1043 = arith.muli %1029, %c12 : index
                        %1044 = vector.load %2[%1029, %1004] : memref<2x16xf32>, vector<8xf32>
                        %1045 = vector.load %3[%1029, %1004] : memref<2x16xf32>, vector<8xf32>
                        %1046 = vector.load %2[%1029, %1006] : memref<2x16xf32>, vector<8xf32>
                        %1047 = vector.load %3[%1029, %1006] : memref<2x16xf32>, vector<8xf32>
                        %1048 = arith.divui %903, %c19 : index
                        %1049 = arith.addi %1048, %1029 : index
                        %1050 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1051 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1052 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1053 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1054 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1055 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1056 = arith.muli %1049, %c12 : index
                        %1057 = vector.load %1[%1043, %1004] : memref<16x16xi32>, vector<8xi32>
                        %1058 = vector.load %1[%1043, %1006] : memref<16x16xi32>, vector<8xi32>
                        %1059 = vector.bitcast %1057 : vector<8xi32> to vector<32xi8>
                        %1060 = vector.bitcast %1058 : vector<8xi32> to vector<32xi8>
                        %1061 = memref.load %m0[%988, %1056] : memref<9x16xi32>
                        %1062 = vector.broadcast %1061 : i32 to vector<8xi32>
                        %1063 = vector.bitcast %1062 : vector<8xi32> to vector<32xi8>
                        %1064 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1059, %1063) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1065 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1060, %1063) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1066 = memref.load %m0[%991, %1056] : memref<9x16xi32>
                        %1067 = vector.broadcast %1066 : i32 to vector<8xi32>
                        %1068 = vector.bitcast %1067 : vector<8xi32> to vector<32xi8>
                        %1069 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1059, %1068) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1070 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1060, %1068) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1071 = memref.load %m0[%994, %1056] : memref<9x16xi32>
                        %1072 = vector.broadcast %1071 : i32 to vector<8xi32>
                        %1073 = vector.bitcast %1072 : vector<8xi32> to vector<32xi8>
                        %1074 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1059, %1073) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1075 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1060, %1073) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1076 = memref.load %m0[%997, %1056] : memref<9x16xi32>
                        %1077 = vector.broadcast %1076 : i32 to vector<8xi32>
                        %1078 = vector.bitcast %1077 : vector<8xi32> to vector<32xi8>
                        %1079 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1059, %1078) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1080 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1060, %1078) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1081 = memref.load %m0[%1000, %1056] : memref<9x16xi32>
// 506 lines more
                        %1588 = vector.broadcast %1587 : f32 to vector<8xf32>
                        %1589 = math.fma %1586, %1588, %1040 : vector<8xf32>
                        %1590 = memref.load %m2[%1003, %1049] : memref<9x2xf32>
                        %1591 = vector.broadcast %1590 : f32 to vector<8xf32>
                        %1592 = math.fma %1045, %1591, %1589 : vector<8xf32>
                        %1593 = arith.mulf %1504, %1046 : vector<8xf32>
                        %1594 = llvm.call_intrinsic "llvm.arithmetic.fence"(%1593) : (vector<8xf32>) -> vector<8xf32>
                        %1595 = memref.load %m1[%1003, %1049] : memref<9x2xf32>
                        %1596 = vector.broadcast %1595 : f32 to vector<8xf32>
                        %1597 = math.fma %1594, %1596, %1041 : vector<8xf32>
                        %1598 = memref.load %m2[%1003, %1049] : memref<9x2xf32>
                        %1599 = vector.broadcast %1598 : f32 to vector<8xf32>
                        %1600 = math.fma %1047, %1599, %1597 : vector<8xf32>
                        scf.yield %1512, %1520, %1528, %1536, %1544, %1552, %1560, %1568, %1576, %1584, %1592, %1600 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                      }

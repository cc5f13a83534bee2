// castiron emit --kernel experts --shape 2x16x64 --codec q4_1 --tokens 9 --numerics fast --isa avx2 --threads 2
// 1933 lines, sha256 c0949e932bc00a3306e5ea86f191c61dc6e2024a40324c611cc8f3d4b56ef420
                      %1032:12 = scf.for %1019 = %c0 to %c3 step %c4 iter_args(%1020 = %1007, %1021 = %1008, %1022 = %1009, %1023 = %1010, %1024 = %1011, %1025 = %1012, %1026 = %1013, %1027 = %1014, %1028 = %1015, %1029 = %1016, %1030 = %1017, %1031 = %1018) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                        %1033 = arith.muli %1019, %c12 : index
                        %1034 = vector.load %2[%1019, %994] : memref<2x16xf32>, vector<8xf32>
                        %1035 = vector.load %3[%1019, %994] : memref<2x16xf32>, vector<8xf32>
                        %1036 = vector.load %2[%1019, %996] : memref<2x16xf32>, vector<8xf32>
                        %1037 = vector.load %3[%1019, %996] : memref<2x16xf32>, vector<8xf32>
                        %1038 = arith.divui %893, %c19 : index
                        %1039 = arith.addi %1038, %1019 : index
                        %1040 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1041 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1042 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1043 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1044 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1045 = vector.broadcast %c1 : i32 to vector<8xi32>
                        %1046 = arith.muli %1039, %c12 : index
                        %1047 = vector.load %1[%1033, %994] : memref<16x16xi32>, vector<8xi32>
                        %1048 = vector.load %1[%1033, %996] : memref<16x16xi32>, vector<8xi32>
                        %1049 = vector.bitcast %1047 : vector<8xi32> to vector<32xi8>
                        %1050 = vector.bitcast %1048 : vector<8xi32> to vector<32xi8>
                        %1051 = memref.load %m0[%978, %1046] : memref<9x16xi32>
                        %1052 = vector.broadcast %1051 : i32 to vector<8xi32>
                        %1053 = vector.bitcast %1052 : vector<8xi32> to vector<32xi8>
                        %1054 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1049, %1053) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1055 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1050, %1053) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1056 = memref.load %m0[%981, %1046] : memref<9x16xi32>
                        %1057 = vector.broadcast %1056 : i32 to vector<8xi32>
                        %1058 = vector.bitcast %1057 : vector<8xi32> to vector<32xi8>
                        %1059 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1049, %1058) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1060 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1050, %1058) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1061 = memref.load %m0[%984, %1046] : memref<9x16xi32>
                        %1062 = vector.broadcast %1061 : i32 to vector<8xi32>
                        %1063 = vector.bitcast %1062 : vector<8xi32> to vector<32xi8>
                        %1064 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1049, %1063) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1065 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1050, %1063) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1066 = memref.load %m0[%987, %1046] : memref<9x16xi32>
                        %1067 = vector.broadcast %1066 : i32 to vector<8xi32>
                        %1068 = vector.bitcast %1067 : vector<8xi32> to vector<32xi8>
                        %1069 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1049, %1068) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1070 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%1050, %1068) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                        %1071 = memref.load %m0[%990, %1046] : memref<9x16xi32>
// 494 lines more
                        %1566 = memref.load %m1[%993, %1039] : memref<9x2xf32>
                        %1567 = vector.broadcast %1566 : f32 to vector<8xf32>
                        %1568 = math.fma %1565, %1567, %1030 : vector<8xf32>
                        %1569 = memref.load %m2[%993, %1039] : memref<9x2xf32>
                        %1570 = vector.broadcast %1569 : f32 to vector<8xf32>
                        %1571 = math.fma %1035, %1570, %1568 : vector<8xf32>
                        %1572 = arith.mulf %1494, %1036 : vector<8xf32>
                        %1573 = memref.load %m1[%993, %1039] : memref<9x2xf32>
                        %1574 = vector.broadcast %1573 : f32 to vector<8xf32>
                        %1575 = math.fma %1572, %1574, %1031 : vector<8xf32>
                        %1576 = memref.load %m2[%993, %1039] : memref<9x2xf32>
                        %1577 = vector.broadcast %1576 : f32 to vector<8xf32>
                        %1578 = math.fma %1037, %1577, %1575 : vector<8xf32>
                        scf.yield %1501, %1508, %1515, %1522, %1529, %1536, %1543, %1550, %1557, %1564, %1571, %1578 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                      }
